"""The yardsticks draft what we draft and say what plain decoding says."""

from unittest import mock

import pytest
import torch
from transformers import GraniteConfig, GraniteForCausalLM
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from hf_domino import track_acceptance
from hf_domino.evaluation import peers
from hf_domino.evaluation.peers import published_loop, stock_dflash

from ..tiny import SIZES, drafted_rounds, inputs, tiny_drafter, tiny_target

# So few tokens that some drafts of a random drafter are right.
FEW = dict(vocab_size=8)


def pair(**overrides):
    target = tiny_target(**FEW)
    target.generation_config.eos_token_id = None
    return target, tiny_drafter(target, mask_token_id=7, **overrides)


def call(**kwargs):
    ids = torch.randint(1, 5, (1, 7), generator=torch.Generator().manual_seed(3))
    return dict(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False) | kwargs


def ours(target, drafter, **kwargs):
    """Plain tokens, tokens kept in each round, and what is drafted in each."""
    plain = target.generate(**call(**kwargs))
    with track_acceptance() as acceptance:
        rounds = drafted_rounds(target, drafter, **call(**kwargs))
    assert max(acceptance.lengths) > 2 and len(acceptance.lengths) > 5
    return plain, acceptance.lengths, [(ids, tokens) for ids, tokens, _ in rounds]


def assert_same_drafts(rounds, theirs):
    """`theirs` may draft on where the room is shorter than the block."""
    assert len(rounds) <= len(theirs)
    for (ids, tokens), (their_anchor, their_tokens) in zip(rounds, theirs):
        assert torch.equal(ids[:, -1:], their_anchor)
        assert torch.equal(tokens, their_tokens[:, : tokens.shape[1]])


ROPE = {"rope_type": "yarn", "rope_theta": 1e5, "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    "overrides",
    (
        dict(head="none"),
        dict(head="none", target_layer_ids=[3, 1], num_hidden_layers=3, block_size=5, rms_norm_eps=1e-3),
        dict(head="none", rope_parameters=ROPE, num_key_value_heads=4, head_dim=16, hidden_act="gelu"),
    ),
    ids=("plain", "last layer first", "other backbone"),
)
def test_transformers_drafts_the_same_from_the_same_weights(overrides):
    target, drafter = pair(sample_from_anchor=False, **overrides)
    plain, _, rounds = ours(target, drafter)
    theirs, get_candidates = [], DFlashTokenCandidateGenerator.get_candidates

    def recorded(self, input_ids, *args, **kwargs):
        ids, logits = get_candidates(self, input_ids, *args, **kwargs)
        if ids.shape[1] > input_ids.shape[1]:
            theirs.append((input_ids[:, -1:], ids[:, input_ids.shape[1] :]))
        return ids, logits

    stock = stock_dflash(drafter, target)
    assert stock.layers[0].mlp.up_proj.weight.data_ptr() == drafter.layers[0].mlp.up_proj.weight.data_ptr()
    with mock.patch.object(DFlashTokenCandidateGenerator, "get_candidates", recorded):
        stocks = target.generate(**call(), assistant_model=stock, speculation_type="dflash")
    assert torch.equal(plain, stocks)
    assert_same_drafts(rounds, theirs)


def test_of_a_domino_drafter_the_base_is_taken():
    target, drafter = pair(sample_from_anchor=False)
    drafter.set_draft_vocabulary([1, 2])
    stock = stock_dflash(drafter, target)
    assert stock.encoder.fc.weight is not None and not hasattr(stock, "prefix_gru")
    plain = target.generate(**call())
    assert torch.equal(plain, target.generate(**call(), assistant_model=stock, speculation_type="dflash"))


@pytest.mark.parametrize(
    "overrides, reason",
    (
        (dict(sample_from_anchor=True), "sampled from the anchor's slot"),
        (dict(use_qk_norm=False), "does not normalise queries and keys"),
        (dict(attention_bias=True), "biases"),
        (dict(is_causal=True), "causal"),
        (dict(layer_types=["sliding_attention", "full_attention"], sliding_window=9), "sliding layers"),
    ),
)
def test_what_transformers_has_no_word_for_is_refused(overrides, reason):
    target, drafter = pair(**{"sample_from_anchor": False, **overrides})
    with pytest.raises(ValueError, match=f"transformers' DFlash can't express this drafter: [^;]*{reason}[^;]*$"):
        stock_dflash(drafter, target)


def test_a_target_that_scales_its_embeddings_outside_of_them_is_refused():
    target = GraniteForCausalLM(GraniteConfig(**{**SIZES, "embedding_multiplier": 12.0})).eval()
    with pytest.raises(ValueError, match="GraniteForCausalLM does more to its embeddings"):
        stock_dflash(tiny_drafter(target, sample_from_anchor=False, head="none"), target)


@pytest.mark.parametrize(
    "overrides",
    (
        dict(),
        dict(sample_from_anchor=False, num_uncorrected_tokens=0),
        dict(num_uncorrected_tokens=3),
        dict(num_uncorrected_tokens=100),
        dict(head="none"),
    ),
    ids=("public", "own position", "three of the base", "all of the base", "dflash"),
)
def test_the_published_loop_is_ours_without_what_we_save(overrides):
    target, drafter = pair(**overrides)
    plain, lengths, rounds = ours(target, drafter)
    theirs, draft = [], peers.published_draft

    def recorded(target, drafter, anchor, features, context):
        theirs.append((anchor, draft(target, drafter, anchor, features, context)))
        return theirs[-1][1]

    with mock.patch.object(peers, "published_draft", recorded):
        sequence, kept = published_loop(target, drafter, call()["input_ids"], 48)
    assert torch.equal(plain, sequence) and kept == lengths
    assert_same_drafts(rounds, theirs)


def test_the_published_loop_stops_where_plain_decoding_does():
    target, drafter = pair()
    text = target.generate(**call())[0, 7:].tolist()
    whole, cut_rounds = published_loop(target, drafter, call()["input_ids"], 48)[1], 0
    for eos in set(text) - {text[0]}:
        stops = dict(eos_token_id=[eos, 99])
        with track_acceptance() as acceptance:
            assisted = target.generate(**call(**stops), assistant_model=drafter)
        sequence, lengths = published_loop(target, drafter, call()["input_ids"], 48, [eos, 99])
        assert sequence[0, 7:].tolist() == text[: text.index(eos) + 1]
        assert torch.equal(sequence, assisted) and lengths == acceptance.lengths
        cut_rounds += lengths != whole[: len(lengths)]
    assert cut_rounds
    for room, stop in ((48, text[:1]), (1, [])):  # the first token is the last one
        sequence, lengths = published_loop(target, drafter, call()["input_ids"], room, stop)
        assert sequence[0, 7:].tolist() == text[:1] and not lengths


def test_a_sliding_target_is_rolled_back():
    target = tiny_target(**FEW, use_sliding_window=True, sliding_window=9, max_window_layers=1)
    drafter = tiny_drafter(target, mask_token_id=7)
    assert "sliding_attention" in target.config.layer_types
    sequence, lengths = published_loop(target, drafter, call()["input_ids"], 48)
    assert torch.equal(sequence, target.generate(**call())) and max(lengths) > 2


def test_a_drafter_of_another_target_is_refused():
    target, other = pair()[0], tiny_drafter(tiny_target())
    for use in (lambda: stock_dflash(other, target), lambda: published_loop(target, other, inputs()["input_ids"], 4)):
        with pytest.raises(ValueError, match="was not made for Qwen3ForCausalLM"):
            use()
