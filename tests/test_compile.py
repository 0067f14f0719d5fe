"""Drafting through torch.compile: the same tokens as without, or without after one warning."""

import copy

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from .tiny import assert_same_as_plain, drafted_rounds, inputs, tiny_drafter, tiny_target


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


@pytest.mark.parametrize("fields", ({"num_correction_candidates": 5}, {"head": "none"}), ids=("domino", "dflash"))
def test_the_same_drafts_from_few_graphs(target, fields):
    """Traced whole, and not again for every length of the context or every call."""
    drafter = tiny_drafter(target, **fields)
    expected = drafts(target, drafter)
    drafter.compile(backend="aot_eager", fullgraph=True)
    assert drafts(target, drafter) == expected
    graphs = counters["stats"]["unique_graphs"]
    assert 0 < graphs < 16 and not counters["graph_break"]
    assert drafts(target, drafter) == expected
    assert counters["stats"]["unique_graphs"] == graphs
    assert all(getattr(drafter, name).func.compiled is not None for name in ("run_layers", "run_slots"))
    assert_same_as_plain(target, drafter, **inputs())


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
