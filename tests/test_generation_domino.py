"""One round of drafting, seen from inside."""

import pytest
import torch

import hf_domino

from .tiny import drafted_rounds, forbid_host_synchronisation, inputs, tiny_drafter, tiny_target


@torch.no_grad()
@pytest.mark.parametrize("layer_ids", ([0, 2], [3, 1], [3]))
@pytest.mark.parametrize("sample_from_anchor", (True, False))
def test_drafts_are_those_of_the_method(layer_ids, sample_from_anchor):
    """Written once more from the paper, without a cache: features strictly before the anchor, block, head, rollout."""
    target = tiny_target()
    drafter = tiny_drafter(target, target_layer_ids=layer_ids, sample_from_anchor=sample_from_anchor)
    config = drafter.config
    for ids, tokens, logits in drafted_rounds(target, drafter):
        hidden_states = target(ids[:, :-1], output_hidden_states=True).hidden_states
        features = torch.cat([hidden_states[i + 1] for i in layer_ids], dim=-1)
        block = torch.tensor([[ids[0, -1]] + [config.mask_token_id] * (config.block_size - 1)])
        z = drafter(target.get_input_embeddings()(block), features)
        z = z if sample_from_anchor else z[:, 1:]
        drafted = ids[:, -1:]
        for j in range(tokens.shape[1]):
            expected = target.lm_head(z[:, j])
            if j >= config.num_uncorrected_tokens:
                state = drafter.prefix_gru(target.get_input_embeddings()(drafted))[0][:, -1]
                expected = expected + drafter.embed_proj(torch.cat([z[:, j], state], dim=-1))
            torch.testing.assert_close(logits[:, j], expected, atol=1e-3, rtol=1e-3)
            drafted = torch.cat([drafted, expected.argmax(-1, keepdim=True)], dim=1)
        assert torch.equal(drafted[:, 1:], tokens)


def test_sampled_drafts_condition_the_ones_behind_them():
    """The token that the causal state reads is the token that is returned, not the likeliest one (B29)."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    torch.manual_seed(0)
    differs = False
    for ids, tokens, logits in drafted_rounds(target, drafter, do_sample=True, temperature=3.0, top_k=0):
        # `logits` are processed: undo the temperature before comparing with the teacher-forced form.
        read = torch.cat([ids[:, -1:], tokens[:, :-1]], dim=1)
        embeddings = target.get_input_embeddings()(read)
        states = drafter.prefix_gru(embeddings)[0]
        assert states.shape[1] == tokens.shape[1]
        differs |= not torch.equal(tokens, logits.argmax(-1))
    assert differs


@pytest.mark.parametrize("fields", ({}, {"num_correction_candidates": 5}), ids=("all tokens", "shortlist"))
def test_no_host_synchronisation_in_the_slot_loop(monkeypatch, fields):
    """Nothing waits for the device: no tensor becomes a Python number between the first and the last slot."""
    target = tiny_target()
    drafter = tiny_drafter(target, **fields)
    drafter.set_draft_vocabulary(range(1, 40))
    forbid_host_synchronisation(monkeypatch, hf_domino.DominoDrafter, "roll_out")
    target.generate(**inputs(), max_new_tokens=20, do_sample=False, assistant_model=drafter)
    target.generate(**inputs(), max_new_tokens=20, do_sample=True, top_k=0, assistant_model=drafter)


def test_drafting_leaves_no_state_on_the_drafter():
    target = tiny_target()
    drafter = tiny_drafter(target)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    attributes = set(vars(drafter))
    target.generate(**inputs(), max_new_tokens=20, do_sample=False, assistant_model=drafter)
    assert set(vars(drafter)) == attributes
    assert all(torch.equal(before[name], tensor) for name, tensor in drafter.state_dict().items())
