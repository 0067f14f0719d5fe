import copy
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from hf_domino.target import Target
from hf_domino.training.features import compute_features
from hf_domino.training.objective import (
    DraftingObjective,
    base_loss_weight,
    block_masks,
    default_decay,
    draft_blocks,
    drafts_to_learn,
    draw_anchors,
    summarize,
)
from tests.tiny import MASK, VOCAB, tiny_drafter, tiny_target

LAYERS = [
    {},
    {"is_causal": True},
    {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9},
    {"sample_from_anchor": False},
]


@pytest.fixture(scope="module")
def target():
    return Target(tiny_target().requires_grad_(False))


def random_batch(target, lengths=(30, 41), prompt=5, num_anchors=6, layer_ids=(0, 2), seed=0):
    """Texts of random tokens, supervised behind the prompt, with the target's features and anchors."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids, mask = torch.zeros(len(lengths), longest, dtype=torch.long), torch.zeros(len(lengths), longest)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(0, MASK, (length,), generator=generator)
        mask[row, prompt:length] = 1
    attention_mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    features, last_hidden = compute_features(target, ids, attention_mask, layer_ids, last_hidden=True)
    anchors = draw_anchors(mask, torch.arange(len(lengths)), num_anchors, seed=0, epoch=0)
    return dict(input_ids=ids, loss_mask=mask, features=features, last_hidden=last_hidden, anchors=anchors)


def gradients(objective):
    return {name: p.grad.clone() for name, p in objective.drafter.named_parameters()}


def assert_same_gradients(one, other, **tolerance):
    for name in one:
        torch.testing.assert_close(one[name], other[name], msg=lambda m, name=name: f"{name}: {m}", **tolerance)


# ---- anchors


def test_anchors_stand_on_two_supervised_tokens_and_ignore_the_batching():
    mask = torch.zeros(3, 40)
    mask[0, 10:40] = 1
    mask[1, [3, 4, 5, 20, 21, 39]] = 1
    ids = torch.tensor([7, 8, 9])
    anchors = draw_anchors(mask, ids, 8, seed=1, epoch=0)
    assert anchors.shape == (3, 8)
    assert len(set(anchors[0].tolist())) == 8 and anchors[0].min() >= 10 and anchors[0].max() <= 38
    assert sorted(anchors[1].tolist()) == [-1] * 5 + [3, 4, 20]
    assert (anchors[2] == -1).all()

    longer = F.pad(mask[:1], (0, 17))
    assert torch.equal(draw_anchors(longer, ids[:1], 8, seed=1, epoch=0), anchors[:1])
    assert not torch.equal(draw_anchors(mask, ids, 8, seed=1, epoch=1)[0], anchors[0])
    assert not torch.equal(draw_anchors(mask, ids, 8, seed=2, epoch=0)[0], anchors[0])
    assert draw_anchors(mask[2:], ids[2:], 8, seed=1, epoch=0).tolist() == [[-1]]


def test_drafts_are_learned_up_to_the_end_of_the_answer():
    mask = torch.tensor([[0, 1, 1, 1, 0, 1, 1, 1]])
    learned = drafts_to_learn(mask, torch.tensor([[1, 5, 6, -1]]), 4)
    assert learned[0].int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]


# ---- blocks


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("fields", LAYERS)
def test_every_block_is_what_generation_would_draft_there(target, fields, attention):
    drafter = tiny_drafter(target.model, **fields)
    drafter.set_attn_implementation(attention)
    batch = random_batch(target)
    tokens = batch["input_ids"].gather(1, batch["anchors"])
    with torch.no_grad():
        blocks = draft_blocks(drafter, target, tokens, batch["anchors"], batch["features"])
        with mock.patch("hf_domino.training.objective._MASK_ENTRIES", 2000):
            in_passes = draft_blocks(drafter, target, tokens, batch["anchors"], batch["features"])
        for row, anchors in enumerate(batch["anchors"].tolist()):
            for i, anchor in enumerate(anchors):
                block = torch.full((1, 8), MASK)
                block[0, 0] = batch["input_ids"][row, anchor]
                alone = drafter(target.embed(block), batch["features"][row : row + 1, :anchor])
                torch.testing.assert_close(blocks[row, i], alone[0, drafter.config.first_draft_slot :])
    torch.testing.assert_close(in_passes, blocks)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_no_block_sees_its_anchors_features_or_another_block(target, attention):
    """Perturbed features at p may only reach blocks whose anchor is > p; anchors are closer than a block."""
    drafter = tiny_drafter(target.model)
    drafter.set_attn_implementation(attention)
    batch = random_batch(target, lengths=(40,))
    anchors = torch.tensor([[8, 10, 11, 19, 30]])
    tokens = batch["input_ids"].gather(1, anchors)
    with torch.no_grad():
        before = draft_blocks(drafter, target, tokens, anchors, batch["features"])
        for p in (0, 7, 8, 10, 15, 29, 30, 39):
            features = batch["features"].clone()
            features[:, p] += 1
            moved = (draft_blocks(drafter, target, tokens, anchors, features) - before).abs().amax((2, 3))[0]
            assert ((moved > 1e-5) == (anchors[0] > p)).all(), p
        other_tokens = tokens.clone()
        other_tokens[0, 1] += 1
        moved = (draft_blocks(drafter, target, other_tokens, anchors, batch["features"]) - before).abs().amax((2, 3))
        assert (moved[0] > 1e-5).tolist() == [False, True, False, False, False]


@pytest.mark.parametrize("fields", LAYERS[:3])
def test_attention_backends_agree(target, fields):
    """Also where neither queries (6 * 8) nor keys are a multiple of flex attention's tile."""
    from torch.nn.attention.flex_attention import flex_attention

    def uncompiled(query, key, value, training=False, **kwargs):
        return flex_attention(query, key, value, **kwargs)

    drafter = tiny_drafter(target.model, **fields)
    batch = random_batch(target)
    tokens = batch["input_ids"].gather(1, batch["anchors"])
    outputs = {}
    with (
        torch.no_grad(),
        mock.patch("transformers.integrations.flex_attention.compile_friendly_flex_attention", uncompiled),
    ):
        for attention in ("eager", "sdpa", "flex_attention"):
            drafter.set_attn_implementation(attention)
            outputs[attention] = draft_blocks(drafter, target, tokens, batch["anchors"], batch["features"])
        with torch.autocast("cpu", torch.bfloat16):
            low = draft_blocks(drafter, target, tokens, batch["anchors"], batch["features"])
    torch.testing.assert_close(outputs["sdpa"], outputs["eager"])
    torch.testing.assert_close(outputs["flex_attention"], outputs["eager"])
    assert (low - outputs["eager"]).norm() < 0.05 * outputs["eager"].norm()


def test_flex_mask_answers_for_whole_tiles(target):
    """The kernel asks about rows and columns behind the end: they are in the tables, see nothing and are not seen."""
    drafter = tiny_drafter(target.model)
    anchors = torch.tensor([[5, 9, 20]])
    drafter.set_attn_implementation("sdpa")
    dense = block_masks(drafter.config, anchors, 30, torch.float32)["full_attention"][0, 0] == 0
    drafter.set_attn_implementation("flex_attention")
    mask = block_masks(drafter.config, anchors, 30, torch.float32)["full_attention"]
    assert mask.shape == (1, 1, 24, 54)
    zero = torch.tensor(0)
    seen = mask.mask_mod(zero, zero, torch.arange(128)[:, None], torch.arange(128)[None])
    assert torch.equal(seen[:24, :54], dense)
    assert not seen[24:].any() and not seen[:, 54:].any()


# ---- the loss


def plain_loss(objective, batch, base_weight):
    """The objective's formula on whole logits, block by block, in float64."""
    drafter, target, config = objective.drafter, objective.target, objective.drafter.config
    count, loss, total = config.num_draft_tokens, 0.0, 0.0
    for row, anchors in enumerate(batch["anchors"].tolist()):
        for anchor in anchors:
            ids = batch["input_ids"][row]
            block = torch.full((1, config.block_size), MASK)
            block[0, 0] = ids[anchor]
            hidden = drafter(target.embed(block), batch["features"][row : row + 1, :anchor])
            hidden = hidden[:, config.first_draft_slot :]
            known = [j for j in range(count) if anchor + 1 + j < len(ids) and batch["loss_mask"][row, anchor + 1 + j]]
            tokens = F.pad(ids, (0, count + 1))[anchor : anchor + count]
            base = target.base_logits(hidden)
            final = drafter.teacher_forced(hidden, base, target.embed(tokens[None]))
            if objective.loss_vocabulary is not None:
                base, final = base[..., objective.loss_vocabulary], final[..., objective.loss_vocabulary]
                known = [j for j in known if ids[anchor + 1 + j] in objective.loss_vocabulary]
            for j in known:
                weight, label = torch.tensor(-j / objective.decay).exp(), ids[anchor + 1 + j]
                goal = target.base_logits(batch["last_hidden"][row, anchor + j])
                if objective.loss_vocabulary is not None:
                    label = (objective.loss_vocabulary == label).nonzero()[0, 0]
                    goal = goal[objective.loss_vocabulary]
                goal = goal.double().softmax(-1)
                terms = []
                for logits in (base[0, j].double(), final[0, j].double()):
                    log_q = logits.log_softmax(-1)
                    soft, distance = -(goal * log_q).sum(), (goal - log_q.exp()).abs().sum() / 2
                    alpha, beta = objective.soft_target_weight, objective.total_variation_weight
                    terms.append(-(1 - alpha) * log_q[label] + alpha * soft + beta * distance)
                loss = loss + weight * (base_weight * terms[0] + (1 - base_weight) * terms[1])
                total += weight
    return loss / total


@pytest.mark.parametrize("chunk_size", [1, 7, 1000])
@pytest.mark.parametrize(
    "fields, options",
    [
        ({}, {}),
        ({"sample_from_anchor": False, "num_uncorrected_tokens": 0}, {"soft_target_weight": 0.7}),
        ({"head": "none"}, {"total_variation_weight": 0.5}),
        ({}, {"soft_target_weight": 0.4, "total_variation_weight": 0.5, "decay": 2.0}),
        ({}, {"loss_vocabulary": torch.arange(0, VOCAB, 3), "soft_target_weight": 0.5}),
    ],
)
def test_chunks_give_the_plain_loss_and_gradient(target, fields, options, chunk_size):
    objective = DraftingObjective(tiny_drafter(target.model, **fields), target, chunk_size=chunk_size, **options)
    batch = random_batch(target, lengths=(20, 27), num_anchors=4)
    loss, _ = objective(**batch, base_weight=0.3)
    loss.backward()
    chunked = gradients(objective)
    objective.zero_grad()
    plain = plain_loss(objective, batch, base_weight=0.3)
    plain.backward()
    torch.testing.assert_close(loss.double(), plain, rtol=1e-5, atol=0)
    assert_same_gradients(chunked, gradients(objective), rtol=1e-3, atol=1e-5)


def test_restricted_head_keeps_what_the_target_does_to_its_logits():
    model = tiny_target().requires_grad_(False)
    model.config.final_logit_softcapping = 3.0
    vocabulary = torch.tensor([4, 9, 50])
    for head in (model.lm_head, torch.nn.Sequential(model.lm_head)):
        target = Target(model)
        target.head = head
        objective = DraftingObjective(tiny_drafter(model), target, loss_vocabulary=vocabulary)
        hidden = torch.randn(2, 3, 32)
        torch.testing.assert_close(
            objective.loss_target.base_logits(hidden), target.base_logits(hidden)[..., vocabulary]
        )


def test_one_gradient_however_the_step_is_batched(target):
    lengths = (30, 12, 41, 25, 9, 33, 18, 40)
    objective = DraftingObjective(tiny_drafter(target.model), target)
    whole = random_batch(target, lengths)
    normalizer = objective.draft_weights(whole["input_ids"], whole["loss_mask"], whole["anchors"]).sum()
    losses, grads = [], []
    for size in (8, 4, 1):
        objective.zero_grad()
        losses.append(0.0)
        for start in range(0, 8, size):
            longest = max(lengths[start : start + size])
            batch = {
                name: values[start : start + size] if name == "anchors" else values[start : start + size, :longest]
                for name, values in whole.items()
            }
            loss, _ = objective(**batch, base_weight=0.5, normalizer=normalizer)
            loss.backward()
            losses[-1] += loss.item()
        grads.append(gradients(objective))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    for other in grads[1:]:
        assert_same_gradients(grads[0], other, rtol=1e-4, atol=1e-6)


def test_blocks_that_fill_up_the_batch_touch_no_other(target):
    """Not even one whose anchor is the first token."""
    objective = DraftingObjective(tiny_drafter(target.model), target)
    batch = random_batch(target, lengths=(20,), prompt=0)
    losses = []
    for anchors in ([0, 6], [0, 6, -1, -1]):
        loss, sums = objective(**{**batch, "anchors": torch.tensor([anchors])}, base_weight=0.5)
        losses.append(loss.item())
        assert sums["anchors"] == 2 and sums["rows"] == 16
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize("supervised", [[], [5, 7, 9], [19]])
def test_sequences_without_an_anchor_are_counted_and_give_zero(target, supervised):
    batch = random_batch(target, lengths=(20,))
    batch["loss_mask"] = torch.zeros(1, 20)
    batch["loss_mask"][0, supervised] = 1
    batch["anchors"] = draw_anchors(batch["loss_mask"], torch.tensor([0]), 4, seed=0, epoch=0)
    objective = DraftingObjective(tiny_drafter(target.model), target)
    loss, sums = objective(**batch, base_weight=0.5)
    loss.backward()
    assert loss.item() == 0 and summarize(sums)["skipped_sequences"] == 1
    assert all((p.grad == 0).all() for p in objective.drafter.parameters())


def test_short_and_late_supervised_sequences_train_beside_bad_ones(target):
    batch = random_batch(target, lengths=(4, 20, 20), prompt=1)
    batch["loss_mask"][1, :18] = 0
    batch["loss_mask"][2] = 0
    batch["anchors"] = draw_anchors(batch["loss_mask"], torch.arange(3), 4, seed=0, epoch=0)
    objective = DraftingObjective(tiny_drafter(target.model), target)
    loss, sums = objective(**batch, base_weight=0.5)
    loss.backward()
    assert torch.isfinite(loss) and sums["skipped"] == 1 and sums["rows"] == 2 + 1 + 1
    assert all(torch.isfinite(p.grad).all() for p in objective.drafter.parameters())


def test_curriculum():
    assert [base_loss_weight(step, 10) for step in (0, 5, 10, 11)] == [1.0, 0.5, 0.0, 0.0]
    assert [base_loss_weight(step, 10, start=0.8, share=0.5) for step in (0, 5, 9)] == [0.8, 0.0, 0.0]
    assert base_loss_weight(0, None, share=0) == 0.0
    with pytest.raises(ValueError, match="number of steps must be known"):
        base_loss_weight(0, None)
    with pytest.raises(ValueError, match="lambda_start"):
        base_loss_weight(0, 10, start=1.5)
    assert (default_decay(8), default_decay(16)) == (4, 7)


def test_both_parts_get_a_gradient_when_they_should(target):
    batch = random_batch(target)
    objective = DraftingObjective(tiny_drafter(target.model), target)
    head = ("prefix_gru.weight_ih_l0", "embed_proj.0.weight", "embed_proj.2.weight")
    for base_weight in (1.0, 0.5, 0.0):
        objective.zero_grad()
        objective(**batch, base_weight=base_weight)[0].backward()
        grads = gradients(objective)  # every parameter has one
        assert all(bool(grads[name].any()) == (base_weight < 1) for name in head)
        assert grads["layers.0.self_attn.q_proj.weight"].any()


def test_metrics_tell_base_from_final(target):
    """A drafter whose correction is made to say one token: final hits are counted where that is the label."""
    drafter = tiny_drafter(target.model, num_uncorrected_tokens=0)
    objective = DraftingObjective(drafter, target, soft_target_weight=0.5)
    batch = random_batch(target)
    batch["input_ids"][:, 6:] = 11
    with torch.no_grad():
        drafter.embed_proj[2].weight.zero_()
        _, before = objective(**batch, base_weight=0.5)
        correction = drafter.correction_features
        drafter.correction_features = lambda *args: torch.ones_like(correction(*args))
        drafter.embed_proj[2].weight[11] = 1000.0
        _, sums = objective(**batch, base_weight=0.5)
    metrics, metrics_before = summarize(sums, by_slot=True), summarize(before)
    assert metrics["accuracy"] == metrics["accuracy_8"] == 1
    assert metrics["acceptance_at_anchors"] == pytest.approx(1 + sums["rows"].item() / sums["anchors"].item())
    for name in ("base_accuracy", "base_acceptance_at_anchors", "base_loss", "base_total_variation"):
        assert metrics[name] == metrics_before[name], name
    assert metrics["base_accuracy"] < 0.2 and 0 < metrics["base_total_variation"] <= 1


def test_loss_is_float32_even_when_everything_is_bfloat16(target):
    model = copy.deepcopy(target.model).bfloat16()
    low = Target(model)
    objective = DraftingObjective(tiny_drafter(model).bfloat16(), low, soft_target_weight=0.5)
    batch = random_batch(low)
    loss, _ = objective(**batch, base_weight=0.0)
    assert loss.dtype == torch.float32
    hidden, labels = torch.randn(50, 32).bfloat16(), torch.randint(0, VOCAB, (50,))
    logits = low.base_logits(hidden)
    goal = torch.randn(50, VOCAB).softmax(-1)
    ours = objective._draft_loss(logits.float(), labels, goal)[0]
    exact = logits.double().log_softmax(-1)
    exact = -0.5 * exact.gather(1, labels[:, None])[:, 0] - 0.5 * (goal.double() * exact).sum(-1)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_bfloat16_gru_has_a_backward_also_in_eval_mode(target, training):
    model = copy.deepcopy(target.model).bfloat16()
    objective = DraftingObjective(tiny_drafter(model).bfloat16(), Target(model)).train(training)
    objective(**random_batch(objective.target), base_weight=0.0)[0].backward()
    grads = gradients(objective)
    assert all(torch.isfinite(grad).all() for grad in grads.values()) and grads["prefix_gru.weight_ih_l0"].any()


def test_autocast_and_gradient_checkpointing_train(target):
    drafter = tiny_drafter(target.model)
    objective = DraftingObjective(drafter, target).train()
    batch = random_batch(target)
    objective(**batch, base_weight=0.5)[0].backward()
    exact = gradients(objective)
    objective.gradient_checkpointing_enable()
    objective.zero_grad()
    objective(**batch, base_weight=0.5)[0].backward()
    assert_same_gradients(gradients(objective), exact)
    objective.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = objective(**batch, base_weight=0.5)
    loss.backward()
    low = gradients(objective)
    assert loss.dtype == torch.float32
    for name, grad in exact.items():
        assert (low[name] - grad).norm() < 0.1 * grad.norm(), name
