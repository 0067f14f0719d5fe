"""EAGLE-3's training: what is trained is what drafts, and trained drafters are accepted."""

import pytest
import torch

from hf_domino import Eagle3Drafter
from hf_domino.modeling_drafter import ContextCache
from hf_domino.training.eagle3 import Eagle3Objective
from hf_domino.training.features import Conversations, collate, compute_features
from hf_domino.training.objective import draw_anchors
from hf_domino.training.trainer import DominoTrainer
from hf_domino.training.walk import walk
from tests.tiny import tiny_eagle3, tiny_target
from tests.training.test_trainer import arguments, generated_lengths
from tests.training.test_walk import generated
from tests.training.toy import VOCAB, frozen, toy_records, toy_target, toy_text


@pytest.fixture(scope="module")
def target():
    return frozen(tiny_target())


@pytest.fixture(scope="module")
def toy():
    return frozen(toy_target())


def batch_of(target, drafter, lengths=(17, 12), prompt=4):
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(1, 90, (length,), generator=generator).tolist() for length in lengths]
    records = [{"input_ids": ids, "loss_mask": [0] * prompt + [1] * (len(ids) - prompt)} for ids in texts]
    return with_features(target, drafter, records)


def with_features(target, drafter, records):
    batch = collate(list(Conversations(records)))
    layers = drafter.config.feature_layers(target.config.num_hidden_layers)
    features, last_hidden = compute_features(
        target, batch["input_ids"], batch["attention_mask"], layers, last_hidden=True
    )
    return batch["input_ids"], batch["loss_mask"], features, last_hidden


@torch.no_grad()
@pytest.mark.parametrize("fields", ({}, {"norm_before_residual": True, "use_qk_norm": True}))
def test_what_is_trained_is_what_drafts(target, fields):
    """Every row and step of `unroll` is what a chain of single passes behind a cached context gives."""
    drafter = tiny_eagle3(target.model, **fields)
    ids, _, features, _ = batch_of(target, drafter, lengths=(17,))
    embeddings, count = target.embed(ids), 4
    steps = drafter.unroll(embeddings, features, count)
    assert len(steps) == count and steps[0].shape == embeddings.shape
    context = ContextCache(1)
    for row in range(17 - count):
        given = slice(row, row + 1)
        hidden = drafter(embeddings[:, row + 1 : row + 2], drafter.project(features[:, given]), context)
        for step in range(count):
            torch.testing.assert_close(steps[step][:, given], hidden, atol=1e-4, rtol=1e-4)
            if step + 1 < count:
                hidden = drafter(embeddings[:, row + step + 2 : row + step + 3], hidden, context)
        context.length = row + 1


def written_out(drafter, target, ids, mask, anchors, features, last_hidden, soft):
    """The loss, draft by draft."""
    vocabulary = drafter.draft_vocabulary.tolist()
    total, weights = 0.0, 0.0
    steps = drafter.unroll(target.embed(ids), features, 7)
    for b in range(len(ids)):
        for anchor in (int(a) for a in anchors[b] if a > 0):
            for k in range(7):
                place = anchor + 1 + k
                if place >= ids.shape[1] or not mask[b, place]:
                    break
                if (label := int(ids[b, place])) not in vocabulary:
                    continue
                log_q = drafter.draft_logits(steps[k][b, anchor - 1]).log_softmax(-1)
                goal = target.base_logits(last_hidden[b, place - 1])[vocabulary].softmax(-1)
                loss = -(soft * (goal * log_q).sum() + (1 - soft) * log_q[vocabulary.index(label)])
                total, weights = total + 0.8**k * loss, weights + 0.8**k
    return total / weights


@pytest.mark.parametrize("soft", (1.0, 0.3, 0.0))
@pytest.mark.parametrize("chunk_size", (5, 1000))
def test_loss_and_gradients(target, soft, chunk_size):
    drafter = tiny_eagle3(target.model, draft_vocabulary_size=60)
    ids, mask, features, last_hidden = batch_of(target, drafter)
    anchors = draw_anchors(mask, torch.arange(2), 5, seed=0, epoch=0)
    objective = Eagle3Objective(drafter, target, soft_target_weight=soft, chunk_size=chunk_size)
    loss, sums = objective(ids, mask, anchors, features, 0.5, last_hidden=last_hidden if soft else None)
    expected = written_out(drafter, target, ids, mask, anchors, features, last_hidden, soft)
    torch.testing.assert_close(loss, expected)
    assert 0 < sums["rows"] < sums["drafts"].sum()  # some tokens are outside the vocabulary
    own, others = (torch.autograd.grad(value, list(drafter.parameters())) for value in (loss, expected))
    for gradient, other in zip(own, others):
        torch.testing.assert_close(gradient, other, atol=1e-5, rtol=1e-3)
        assert gradient.any()


def test_the_vocabulary_is_the_drafters_own(target):
    with pytest.raises(ValueError, match="draft_vocabulary_size"):
        Eagle3Objective(tiny_eagle3(target.model), target, loss_vocabulary=torch.arange(9))


def test_a_new_drafter_starts_with_the_targets_head(target, caplog):
    drafter = Eagle3Drafter.from_target(target.model, [40, 3, 8], num_draft_tokens=2, target_layer_ids=[0, 1, 2])
    assert drafter.draft_vocabulary.tolist() == [3, 8, 40] and drafter.t2d.nonzero()[:, 0].tolist() == [3, 8, 40]
    assert torch.equal(drafter.lm_head.weight, target.head.weight[[3, 8, 40]])
    assert torch.equal(drafter.norm.weight, target.model.model.norm.weight) and not caplog.records
    whole = Eagle3Drafter.from_target(target.model, target_layer_ids=[0, 1, 2])
    assert whole.d2t is None and torch.equal(whole.lm_head.weight, target.head.weight)
    with pytest.raises(ValueError, match="distinct token ids"):
        Eagle3Drafter.from_target(target.model, [3, 3, 8], target_layer_ids=[0, 1, 2])


def test_of_another_head_a_new_drafter_does_not_start_and_says_so(caplog):
    model = tiny_target()
    model.lm_head = torch.nn.Sequential(model.lm_head)
    drafter = Eagle3Drafter.from_target(model, target_layer_ids=[0, 1, 2])
    assert len(drafter.lm_head.weight) == 97 and "can't be copied" in caplog.text


def half_trained(toy, steps=25):
    drafter = Eagle3Drafter.from_target(
        toy.model, target_layer_ids=[0, 1, 2], num_draft_tokens=3, intermediate_size=64, initializer_range=0.2
    )
    ids, mask, features, last_hidden = with_features(toy, drafter, toy_records())
    objective = Eagle3Objective(drafter, toy, soft_target_weight=1.0)
    optimizer = torch.optim.AdamW(drafter.parameters(), 0.003, weight_decay=0.0)
    for step in range(steps):
        anchors = draw_anchors(mask, torch.arange(len(ids)), 4, seed=0, epoch=step)
        loss, _ = objective(ids, mask, anchors, features, 0.0, last_hidden=last_hidden)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.eval()


def test_walk_is_what_generate_does(toy):
    torch.manual_seed(0)
    drafter = half_trained(toy)
    answers = [generated(toy, drafter, toy_text(i, 2 + i), length) for i, length in enumerate((40, 7, 18))]
    for i in (4, 9):
        answers.append(generated(toy, drafter, toy_text(i, 3), 60, eos_token_id=toy_text(i, 30)[-1]))
    records, expected = zip(*answers)
    assert len({length for lengths in expected for length in lengths}) >= 3  # there is something to agree on
    together = walk(drafter, toy, *with_features(toy, drafter, records)[:3])
    assert sorted(together.lengths) == sorted(length for lengths in expected for length in lengths)


def test_toy_language_reaches_the_limit(toy, tmp_path):
    """Trained by the trainer, decoded by generate(): both read the rows alike."""
    drafter = Eagle3Drafter.from_target(
        toy.model, torch.arange(VOCAB - 1), target_layer_ids=[0, 1, 2], num_draft_tokens=4, initializer_range=0.2
    )
    drafter.lm_head.reset_parameters()  # the target's would know it all
    options = dict(max_steps=200, logging_steps=50, per_device_train_batch_size=44, soft_target_weight=1.0)
    trainer = DominoTrainer(
        drafter, toy.model, arguments(tmp_path, **options), toy_records(), eval_dataset=toy_records(6)
    )
    trainer.train()
    assert trainer.state.log_history[3]["acceptance_at_anchors"] > 7
    assert trainer.evaluate()["eval_acceptance_length"] > 4
    assert set(generated_lengths(toy.model, drafter.eval())) == {5}
