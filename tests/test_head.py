"""The Domino head: rolled out and teacher-forced it says what the paper writes, and prepared weights change nothing."""

import pytest
import torch
from torch.nn import functional as F

from hf_domino import DominoConfig, DominoDrafter
from hf_domino.target import Target

from .test_draft_vocabulary import SOME, restricted
from .test_modeling_domino import block, features, poisoned_memory, sharp
from .tiny import MASK, VOCAB, assert_same_as_plain, inputs, tiny_drafter, tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def drafted(target, drafter, batch=1):
    """A greedy block: hidden vectors, base logits and embeddings of what the head reads, tokens, chosen logits."""
    asked = Target(target)
    ids = torch.full((batch, drafter.config.block_size), MASK)
    ids[:, 0] = torch.arange(5, 5 + batch)
    embeddings = asked.embed(ids)
    hidden = drafter(embeddings, features(drafter, 5, batch))[:, drafter.config.first_draft_slot :]
    base = asked.base_logits(hidden).float()

    def greedy(logits, so_far, columns):
        return logits.argmax(-1), logits

    with poisoned_memory():
        tokens, logits = drafter.roll_out(hidden, base, embeddings[:, 0], greedy, asked.embed)
    read = torch.cat([embeddings[:, :1], asked.embed(tokens[:, :-1])], dim=1)
    return hidden, base, read, tokens, torch.stack(logits, dim=1)


@pytest.mark.parametrize("uncorrected", [0, 1, 2])
@pytest.mark.parametrize("sample_from_anchor", [True, False])
@pytest.mark.parametrize("head", ["domino", "none"])
@torch.no_grad()
def test_rolled_out_logits_are_the_teacher_forced_ones(target, uncorrected, sample_from_anchor, head):
    drafter = sharp(
        tiny_drafter(target, num_uncorrected_tokens=uncorrected, sample_from_anchor=sample_from_anchor, head=head)
    )
    hidden, base, read, tokens, logits = drafted(target, drafter, batch=3)
    assert tokens.shape == (3, drafter.config.num_draft_tokens) == (3, 8 if sample_from_anchor else 7)
    assert ((tokens >= 0) & (tokens < VOCAB)).all()
    torch.testing.assert_close(drafter.teacher_forced(hidden, base, read), logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(tokens, logits.argmax(-1))
    # The first drafts are the backbone's own; with a head the others are not.
    uncorrected = uncorrected if head == "domino" else base.shape[1]
    assert torch.equal(logits[:, :uncorrected], base[:, :uncorrected])
    assert (logits[:, uncorrected:] != base[:, uncorrected:]).any(-1).all()


@torch.no_grad()
def test_head_is_what_the_paper_writes(target):
    drafter = sharp(tiny_drafter(target, num_uncorrected_tokens=0))
    hidden, base, read, _, logits = drafted(target, drafter)
    width = drafter.config.causal_state_size
    w_ih, w_hh = drafter.prefix_gru.weight_ih_l0, drafter.prefix_gru.weight_hh_l0
    state = torch.zeros(width)
    for j in range(base.shape[1]):
        (x_r, x_z, x_n), (h_r, h_z, h_n) = (w_ih @ read[0, j]).split(width), (w_hh @ state).split(width)
        reset, update = (x_r + h_r).sigmoid(), (x_z + h_z).sigmoid()
        state = (1 - update) * (x_n + reset * h_n).tanh() + update * state
        rank = F.silu(drafter.embed_proj[0].weight @ torch.cat([hidden[0, j], state]))
        torch.testing.assert_close(logits[0, j], base[0, j] + drafter.embed_proj[2].weight @ rank, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_correction_of_a_slot_depends_on_the_tokens_before_it_only(target):
    drafter = sharp(tiny_drafter(target, num_uncorrected_tokens=0))
    hidden, base, read, _, logits = drafted(target, drafter)
    for j in range(base.shape[1]):
        changed = read.clone()
        changed[:, j] += 1
        difference = (drafter.teacher_forced(hidden, base, changed) != drafter.teacher_forced(hidden, base, read)).any(
            -1
        )
        assert difference[0].tolist() == [slot >= j for slot in range(base.shape[1])]


@torch.no_grad()
def test_chosen_token_is_the_one_that_the_state_reads(target):
    """Whatever `choose` picks, sampled or processed, is returned and fed back."""
    drafter = sharp(tiny_drafter(target))
    asked, (hidden, base, _, _, _) = Target(target), drafted(target, drafter)
    picks = torch.tensor([4, 9, 2, 7, 1, 8, 3, 6])
    prefixes = []

    def choose(logits, so_far, columns):
        prefixes.append(so_far.clone())
        return picks[so_far.shape[1]][None], 2 * logits

    anchor = asked.embed(torch.tensor([[5]]))
    tokens, logits = drafter.roll_out(hidden, base, anchor[:, 0], choose, asked.embed)
    assert torch.equal(tokens[0], picks)
    assert [prefix[0].tolist() for prefix in prefixes] == [picks[:j].tolist() for j in range(8)]
    read = torch.cat([anchor, asked.embed(picks[None, :-1])], dim=1)
    torch.testing.assert_close(
        torch.stack(logits, dim=1), 2 * drafter.teacher_forced(hidden, base, read), rtol=1e-5, atol=1e-5
    )


def test_new_head_is_the_identity(target):
    config = DominoConfig.for_target(target.config, block_size=8, causal_state_size=16, correction_rank=8)
    drafter = DominoDrafter(config)
    hidden, base = block(drafter), torch.randn(1, 8, VOCAB)
    embed = torch.nn.Embedding(VOCAB, config.hidden_size)
    tokens, logits = drafter.roll_out(hidden, base, hidden[:, 0], lambda row, *_: (row.argmax(-1), row), embed)
    assert torch.equal(torch.stack(logits, dim=1), base)
    assert torch.equal(tokens, base.argmax(-1))
    assert torch.equal(drafter.teacher_forced(hidden, base, hidden), base)


@pytest.mark.parametrize("candidates", (None, 4))
@torch.no_grad()
def test_prepared_weights_give_the_logits_of_the_teacher_forced_head(target, candidates):
    drafter, asked, ids = restricted(target), Target(target), torch.tensor(SOME)
    hidden, anchor = torch.randn(2, 8, 32), asked.embed(torch.tensor([[2], [50]]))
    base = asked.base_logits(hidden)

    def choose(logits, so_far, columns):
        best = logits.argmax(-1, keepdim=True)
        return ids[best if columns is None else columns.gather(1, best)][:, 0], logits.amax(-1)

    weights = drafter.head_weights(asked)
    assert weights.inputs.shape == (len(SOME), 48)
    tokens, best = drafter.roll_out(hidden, base[..., SOME], anchor[:, 0], choose, asked.embed, candidates, weights)
    read = torch.cat([anchor, asked.embed(tokens[:, :-1])], dim=1)
    expected = drafter.teacher_forced(hidden, base, read).gather(-1, tokens[..., None])[..., 0]
    torch.testing.assert_close(torch.stack(best, dim=1), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_weights_are_prepared_once_and_again_when_something_changed():
    target = tiny_target()
    drafter, asked, some = restricted(target), Target(target), torch.tensor(SOME)
    changes = (
        lambda: drafter.prefix_gru.weight_ih_l0.mul_(2),
        lambda: drafter.embed_proj[2].weight.add_(1),
        lambda: target.get_input_embeddings().weight.mul_(3),
        lambda: drafter.set_draft_vocabulary(SOME[:4]),
        lambda: setattr(asked, "embeddings", tiny_target().get_input_embeddings()),
        drafter.double,
    )
    for change in changes:
        before = drafter.head_weights(asked)
        assert drafter.head_weights(asked) is before
        change()
        weights, some = drafter.head_weights(asked), drafter.draft_vocabulary
        read = asked.embed(some).to(drafter.dtype) @ drafter.prefix_gru.weight_ih_l0.T
        torch.testing.assert_close(weights.inputs[weights.rows[some]], read.to(weights.inputs))
        torch.testing.assert_close(weights.output, drafter.embed_proj[2].weight[some].to(weights.output))


def test_prepared_weights_stay_small_and_are_float32_on_a_cpu(target):
    drafter = restricted(target).bfloat16()
    weights = drafter.head_weights(Target(target))
    assert {w.dtype for w in (weights.inputs, weights.recurrent, weights.from_state, weights.output)} == {torch.float32}
    wide = tiny_target(vocab_size=5000)
    drafter = tiny_drafter(wide, causal_state_size=64)
    drafter.set_draft_vocabulary(range(5000))
    weights = drafter.head_weights(Target(wide))
    assert weights.inputs is None, "5,000 rows of 192 numbers are more than the drafter has"
    assert drafter.head_weights() is not None and restricted(target, head="none").head_weights() is None
    assert_same_as_plain(wide, drafter, 0.8, **inputs())
