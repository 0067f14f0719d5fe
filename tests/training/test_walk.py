import pytest
import torch

from hf_domino import track_acceptance
from hf_domino.training.features import Conversations, collate, compute_features
from hf_domino.training.walk import walk
from tests.tiny import tiny_drafter, tiny_target
from tests.training.toy import frozen, toy_drafter, toy_records, toy_target, toy_text, toy_training


@pytest.fixture(scope="module")
def target():
    return frozen(toy_target())


def generated(target, drafter, prompt, length, **kwargs):
    """The record of a greedy answer, and the lengths that generate() accepted on the way."""
    ids = torch.tensor([prompt])
    with track_acceptance() as acceptance:
        text = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=drafter,
            max_new_tokens=length,
            do_sample=False,
            pad_token_id=0,
            **kwargs,
        )[0].tolist()
    return {"input_ids": text, "loss_mask": [0] * len(prompt) + [1] * (len(text) - len(prompt))}, acceptance.lengths


def as_batch(target, drafter, records):
    batch = collate(list(Conversations(records)))
    features, _ = compute_features(target, batch["input_ids"], batch["attention_mask"], drafter.config.target_layer_ids)
    return batch["input_ids"], batch["loss_mask"], features


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sample_from_anchor": False},
        {"head": "none"},
        {"num_uncorrected_tokens": 0, "layer_types": ["sliding_attention"], "sliding_window": 6},
    ],
)
def test_walk_is_what_generate_does(target, fields):
    """With a half-trained drafter, on answers of several lengths, two of them ended by a stop token."""
    drafter = toy_drafter(target.model, **fields)
    toy_training(drafter, target, steps=25)
    answers = [generated(target, drafter, toy_text(i, 2 + i), length) for i, length in enumerate((40, 7, 18))]
    for i in (4, 9):
        stop = toy_text(i, 30)[-1]
        answers.append(generated(target, drafter, toy_text(i, 3), 60, eos_token_id=stop))
        assert answers[-1][0]["input_ids"][-1] == stop
    records, expected = zip(*answers)
    assert len({length for lengths in expected for length in lengths}) >= 3  # there is something to agree on
    alone = [walk(drafter, target, *as_batch(target, drafter, [record])).lengths for record in records]
    assert alone == list(expected)
    together = walk(drafter, target, *as_batch(target, drafter, records))
    assert sorted(together.lengths) == sorted(length for lengths in expected for length in lengths)


def test_base_alone_is_the_walk_of_a_drafter_without_its_head(target):
    drafter, headless = toy_drafter(target.model), toy_drafter(target.model, head="none")
    toy_training(drafter, target, steps=25)
    headless.load_state_dict(drafter.state_dict(), strict=False)
    batch = as_batch(target, drafter, toy_records(5))
    base = walk(drafter, target, *batch, use_head=False)
    assert base.lengths == walk(headless, target, *batch).lengths
    assert base.mean < walk(drafter, target, *batch).mean


def test_every_answer_of_a_conversation_is_walked():
    target = frozen(tiny_target())
    drafter = tiny_drafter(target.model)
    mask = torch.zeros(40, dtype=torch.long)
    mask[5:12] = mask[20:21] = mask[25:40] = 1
    record = {"input_ids": list(range(40)), "loss_mask": mask.tolist()}
    lengths = walk(drafter, target, *as_batch(target, drafter, [record])).lengths
    # All behind the first token of an answer are counted; an answer of one token has nothing to draft.
    assert sum(lengths) == 6 + 14
