"""Reading less of the vocabulary: correcting a shortlist, and drafting some tokens only."""

import pytest
import torch
from transformers import AutoModel, GenerationConfig

from hf_domino import DominoDrafter, track_acceptance
from hf_domino.target import Target

from . import test_sampling as sampling
from .tiny import MASK, VOCAB, assert_same_as_plain, drafted_rounds, inputs, tiny_drafter, tiny_target

SOME = [1, 3, 5, 8, 13, 21, 34, 55, 89]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def restricted(target, **fields):
    drafter = tiny_drafter(target, **fields)
    drafter.set_draft_vocabulary(SOME)
    return drafter


@pytest.mark.parametrize("candidates", (5, VOCAB - 1))
def test_a_shortlist_holds_the_largest_base_logits(target, candidates):
    drafter = tiny_drafter(target, num_correction_candidates=candidates)
    _, tokens, logits = drafted_rounds(target, drafter)[0]
    _, exact_tokens, exact = drafted_rounds(target, tiny_drafter(target))[0]
    offered = ~logits[0].isneginf()
    assert offered[0].all(), "the first draft is not corrected: all tokens are offered"
    assert (offered[1:].sum(-1) == candidates).all()
    torch.testing.assert_close(logits[0, 1][offered[1]], exact[0, 1][offered[1]], rtol=1e-4, atol=1e-4)
    if candidates == VOCAB - 1:
        assert torch.equal(tokens, exact_tokens)


def test_only_the_draft_vocabulary_is_drafted(target):
    _, tokens, logits = drafted_rounds(target, restricted(target))[0]
    _, _, exact = drafted_rounds(target, tiny_drafter(target))[0]
    assert set(tokens[0].tolist()) <= set(SOME)
    torch.testing.assert_close(logits[0, 0, SOME], exact[0, 0, SOME], rtol=1e-4, atol=1e-4)
    assert logits[0, :, [0, 2, 4]].isneginf().all()


@pytest.mark.parametrize("rate", (1.0, 0.8, 0.3))
@pytest.mark.parametrize("head", ("domino", "none"))
def test_the_answer_does_not_change(target, rate, head):
    for drafter in (
        restricted(target, head=head),
        restricted(target, head=head, num_correction_candidates=4),
        tiny_drafter(target, head=head, num_correction_candidates=4),
    ):
        for setting in ({}, {"repetition_penalty": 1.5}, {"suppress_tokens": SOME}):
            assert_same_as_plain(target, drafter, rate, **inputs(), **setting)


@pytest.mark.parametrize("vocabulary", (None, [0, 1, 3, 4]), ids=("all tokens", "draft vocabulary"))
def test_sampling_still_draws_from_the_target(vocabulary):
    target = sampling.sampling_target()
    drafter = sampling.sampling_drafter(target, num_correction_candidates=3)
    drafter.set_draft_vocabulary(vocabulary)
    kwargs = sampling.kwargs_of(sampling.SETTINGS["plain"])
    exact = sampling.exact_distribution(target, kwargs)
    with track_acceptance() as acceptance:
        counts = sampling.draw(target, drafter, kwargs)
    mean, deviation = sampling.sampling_noise(exact, sampling.DRAWS)
    assert acceptance.mean > 1.03 and sampling.total_variation(counts, exact) < mean + 4 * deviation


def test_sampling_where_no_candidate_is_allowed():
    target = sampling.sampling_target()
    drafter = sampling.sampling_drafter(target)
    drafter.set_draft_vocabulary([0, 1])
    kwargs = {**sampling.kwargs_of(sampling.SETTINGS["plain"]), "suppress_tokens": [0, 1], "max_new_tokens": 12}
    for seed in range(20):
        torch.manual_seed(seed)
        out = target.generate(**kwargs, assistant_model=drafter)
        assert (out[0, 4:] > 1).all()


def test_candidates_for_one_call(target):
    drafter = tiny_drafter(target)
    config = GenerationConfig(num_correction_candidates=3, max_new_tokens=12, do_sample=False)
    rounds = drafted_rounds(target, drafter, generation_config=config)
    assert ((rounds[0][2][0, 1:] > -1e30).sum(-1) == 3).all()
    rounds = drafted_rounds(target, drafter)
    assert ((rounds[0][2][0, 1:] > -1e30).sum(-1) == VOCAB).all()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_saved_with_the_weights(target, tmp_path, dtype):
    drafter = restricted(target).to(dtype)
    drafter.save_pretrained(tmp_path)
    for loaded in (AutoModel.from_pretrained(tmp_path), DominoDrafter.from_pretrained(tmp_path, dtype=torch.float32)):
        assert loaded.draft_vocabulary.tolist() == SOME and loaded.draft_vocabulary.dtype == torch.long
        assert loaded.config.draft_vocabulary_size == len(SOME)
    loaded.set_draft_vocabulary(None)
    loaded.save_pretrained(tmp_path / "whole")
    whole = AutoModel.from_pretrained(tmp_path / "whole")
    assert whole.draft_vocabulary is None and whole.config.draft_vocabulary_size is None


@pytest.mark.parametrize(
    "token_ids, message",
    [([1], "at least two"), ([1, 1, 2], "distinct"), ([-1, 2], "from -1 to 2"), ([3, 97], "0 to 96.*from 3 to 97")],
)
def test_bad_draft_vocabularies(target, tmp_path, token_ids, message):
    drafter = tiny_drafter(target)
    with pytest.raises(ValueError, match=message):
        drafter.set_draft_vocabulary(token_ids)
    if len(token_ids) > 1:  # the same in a file
        drafter.draft_vocabulary = torch.tensor(token_ids)
        drafter.config.draft_vocabulary_size = len(token_ids)
        drafter.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=message):
            DominoDrafter.from_pretrained(tmp_path)


@torch.no_grad()
def test_restricted_heads(target):
    asked, hidden, ids = Target(target), torch.randn(1, 3, 32), torch.tensor(SOME)
    expected = asked.base_logits(hidden)[..., SOME]
    torch.testing.assert_close(asked.restrict(ids).base_logits(hidden), expected)

    class Head(torch.nn.Module):
        def __init__(self, head):
            super().__init__()
            self.inner = head

        def forward(self, hidden):
            return self.inner(hidden)

    asked.head = Head(asked.head)
    torch.testing.assert_close(asked.restrict(ids).base_logits(hidden), expected)


@torch.no_grad()
def test_rows_are_gathered_once_and_again_when_they_changed():
    target = tiny_target()
    ids, hidden = torch.tensor(SOME), torch.randn(1, 3, 32)
    with torch.inference_mode():
        Target(target).restrict(ids)
    first = Target(target).restrict(ids).head
    assert not first.weight.is_inference()
    assert Target(target).restrict(ids.clone()).head is first
    for change in (lambda: target.lm_head.weight.mul_(2), target.double, target.float):
        change()
        again = Target(target).restrict(ids)
        expected = target.lm_head(hidden.to(target.dtype))[..., SOME]
        torch.testing.assert_close(again.base_logits(hidden), expected)
        assert Target(target).restrict(ids[:3]).head.out_features == 3


def test_mask_token_is_no_draft_to_worry_about(target):
    drafter = tiny_drafter(target)
    drafter.set_draft_vocabulary([*SOME, MASK])
    assert_same_as_plain(target, drafter, 0.8, **inputs())


@pytest.mark.parametrize("field", ("num_correction_candidates", "draft_vocabulary_size"))
@pytest.mark.parametrize("value", (1, 0, -3, VOCAB + 1, 2.5, "many"))
def test_sizes_out_of_range(target, field, value):
    with pytest.raises(ValueError, match=rf"DominoConfig\.{field} must be an integer from 2 to {VOCAB}"):
        tiny_drafter(target, **{field: value})


def test_candidates_are_a_setting_of_a_loaded_drafter(target, tmp_path):
    tiny_drafter(target).save_pretrained(tmp_path)
    drafter = AutoModel.from_pretrained(tmp_path, num_correction_candidates=3)
    assert drafter.config.num_correction_candidates == 3
    assert (~drafted_rounds(target, drafter)[0][2][0, 1:].isneginf()).sum(-1).tolist() == [3] * 7
