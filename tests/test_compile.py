"""Drafting through torch.compile: the same tokens as without, or without after one warning."""

import copy

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from hf_domino import DominoCandidateGenerator, modeling_domino

from .tiny import assert_same_as_plain, drafted_rounds, inputs, oracle, tiny_drafter, tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def drafts(target, drafter, **kwargs):
    return [tokens[0].tolist() for _, tokens, _ in drafted_rounds(target, drafter, max_new_tokens=30, **kwargs)]


SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 12}


@pytest.mark.parametrize(
    "fields",
    ({"num_correction_candidates": 5}, {"head": "none"}, {"sample_from_anchor": False}, SLIDING),
    ids=("domino", "dflash", "dflash alignment", "sliding"),
)
def test_the_same_drafts_from_few_graphs(target, fields, monkeypatch):
    """Traced whole, each shape anew: once for each size of the buffers, and not again for any round or call."""
    monkeypatch.setattr(modeling_domino, "_SMALLEST_BUCKET", 16)
    drafter = tiny_drafter(target, **fields)
    expected = drafts(target, drafter)
    drafter.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    assert drafts(target, drafter) == expected
    graphs = 3 + (drafter.config.head == "domino")  # buffers of 16, 32 and 64 tokens; the rollout has one shape
    assert counters["stats"]["unique_graphs"] == graphs and not counters["graph_break"]
    assert drafts(target, drafter) == expected
    assert counters["stats"]["unique_graphs"] == graphs
    assert all(getattr(drafter, name).func.compiled is not None for name in ("run_layers", "run_slots"))
    assert_same_as_plain(target, drafter, **inputs())


@pytest.mark.parametrize("rate", (0.6, 1.0))
def test_rounds_of_any_length(target, rate, monkeypatch):
    """However many drafts are kept, a compiled drafter's vectors are those of one that isn't."""
    monkeypatch.setattr(modeling_domino, "_SMALLEST_BUCKET", 16)
    drafter = tiny_drafter(target)
    vectors = []

    def recorded(self, embeddings):
        hidden = backbone(self, embeddings)
        vectors.append(hidden)
        return hidden

    backbone = DominoCandidateGenerator.backbone
    monkeypatch.setattr(DominoCandidateGenerator, "backbone", recorded)
    call = {**inputs(), "do_sample": False, "max_new_tokens": 60}
    plain = target.generate(**call)[0, 7:]
    for compiled in (False, True):
        if compiled:
            expected, vectors = vectors, []
            drafter.compile(backend="eager")
        with oracle(plain, rate):
            target.generate(**call, assistant_model=drafter)
    assert len(vectors) == len(expected) >= 60 // 9
    for own, other in zip(vectors, expected):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


def test_a_copy_drafts_with_its_own_weights(target):
    drafter = tiny_drafter(target)
    other = tiny_drafter(target)
    with torch.no_grad():
        other.norm.weight.mul_(-1)
    expected = drafts(target, other)
    assert expected != drafts(target, drafter)
    drafter.compile(backend="eager")
    copied = copy.deepcopy(drafter)
    copied.load_state_dict(other.state_dict())
    assert drafts(target, copied) == expected


def test_a_compiler_that_fails_is_left_out_with_one_warning(target, caplog):
    def broken(graph, example_inputs):
        raise RuntimeError("no compiler here")

    drafter = tiny_drafter(target)
    expected = drafts(target, drafter)
    drafter.compile(backend=broken)
    assert drafts(target, drafter) == expected
    assert drafts(target, drafter) == expected
    warnings = [record.message for record in caplog.records if "Drafting without torch.compile" in record.message]
    assert len(warnings) == 1 and "no compiler here" in warnings[0]


@pytest.mark.slow  # a C++ compiler, and minutes
@pytest.mark.parametrize("fields", ({}, {"num_correction_candidates": 5}, {"head": "none"}))
def test_the_default_compiler(target, fields, caplog):
    drafter = tiny_drafter(target, **fields)
    expected = drafts(target, drafter)
    drafter.compile()
    assert drafts(target, drafter) == expected
    assert not [record for record in caplog.records if "Drafting without torch.compile" in record.message]
