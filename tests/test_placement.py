"""Dtypes, quantisation, offloading and caches: a drafter does not mind where its target lives, nor how it is stored."""

import copy

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from torch import nn
from transformers.cache_utils import Cache, QuantizedLayer, StaticLayer

from hf_domino import track_acceptance
from hf_domino.assisted_generation import _CACHE as CACHE
from tests.families import build_text, text_target
from tests.tiny import assert_same_as_plain, drafted_rounds, inputs, no_forward, oracle, tiny_drafter, tiny_target

RATES = (1.0, 0.8)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
needs_static_rollback = pytest.mark.skipif(
    not StaticLayer.is_croppable, reason="static caches can't be rolled back in this version of transformers"
)


def assert_same(target, drafter, **kwargs):
    for rate in RATES:
        assert_same_as_plain(target, drafter, rate, **{**inputs(), **kwargs})


def assert_every_token_is_the_targets(target, drafter, margin, seed=0, max_new_tokens=40):
    """What equality becomes where one row of a block is not computed to the bit as a row alone.

    Each token is the largest logit of the pass that verified it, and still within `margin` of the largest when the
    whole text is scored again in one pass.
    """
    kwargs = dict(inputs(seed=seed), do_sample=False, max_new_tokens=max_new_tokens)
    length = kwargs["input_ids"].shape[1]
    plain = target.generate(**kwargs)[0, length:]
    with oracle(plain, 0.8), track_acceptance() as acceptance:
        text = target.generate(**kwargs, assistant_model=drafter, return_dict_in_generate=True, output_logits=True)
    assert max(acceptance.lengths) > 1
    tokens = text.sequences[0, length:]
    assert tokens.tolist() == [int(logits.argmax()) for logits in text.logits]
    with torch.no_grad():
        logits = target(text.sequences).logits[0, length - 1 : -1].float()
    assert float((logits.amax(-1) - logits.gather(1, tokens[:, None])[:, 0]).max()) <= margin


# Dtypes


@pytest.mark.parametrize("drafter_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("target_dtype", DTYPES, ids=str)
def test_target_and_drafter_may_differ_in_dtype(target_dtype, drafter_dtype):
    target = tiny_target().to(target_dtype)
    drafter = tiny_drafter(target).to(drafter_dtype)
    if target_dtype == torch.float32:
        assert_same(target, drafter)
    else:
        assert_every_token_is_the_targets(target, drafter, margin=0.25)
    assert target.generate(**inputs(), do_sample=True, max_new_tokens=8, assistant_model=drafter).shape[1] == 15


@pytest.mark.parametrize("seed", range(4))
def test_in_bfloat16_every_token_is_within_rounding_of_the_largest_logit(seed):
    target = tiny_target().to(torch.bfloat16)
    assert_every_token_is_the_targets(target, tiny_drafter(target), margin=0.25, seed=seed)


# Quantised targets


def test_a_target_with_dynamically_quantised_linear_layers():
    target = tiny_target()
    drafter = tiny_drafter(target)
    quantization = pytest.importorskip("torch.ao.quantization")
    target = quantization.quantize_dynamic(target, {nn.Linear}, torch.qint8)
    assert callable(target.lm_head.weight)
    # The scale of an activation comes from all rows of the block, so that rounding is far coarser than bfloat16's.
    assert_every_token_is_the_targets(target, drafter, margin=2.0)


class PackedHead(nn.Module):
    """An output head without a `weight`."""

    def __init__(self, head):
        super().__init__()
        scale = head.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("packed", (head.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, hidden):
        return nn.functional.linear(hidden, self.packed.to(hidden) * self.scale.to(hidden))


def test_an_output_head_without_a_weight():
    target = tiny_target()
    drafter = tiny_drafter(target)
    target.lm_head = PackedHead(target.lm_head)
    assert_same(target, drafter)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_target_quantised_by_torchao(dtype):
    quantization = pytest.importorskip("torchao.quantization")
    target = tiny_target().to(dtype)
    drafter = tiny_drafter(target)
    quantization.quantize_(target, quantization.Int8WeightOnlyConfig())
    assert type(target.lm_head.weight) is not nn.Parameter
    if dtype == torch.float32:
        assert_same(target, drafter)
    else:
        assert_every_token_is_the_targets(target, drafter, margin=0.5)


# Offloaded targets


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gemma", "bloom", "granite", "gpt2"])
def test_an_offloaded_target(name):
    target = copy.deepcopy(text_target(name))
    drafter = tiny_drafter(target)
    cpu_offload(target, execution_device=torch.device("cpu"))
    assert target.get_output_embeddings().weight.is_meta
    assert_same(target, drafter)


@pytest.mark.parametrize("offloaded", [["model.layers.1", "model.layers.3"], ["model.embed_tokens", "lm_head"]])
def test_a_target_spread_by_a_device_map(offloaded, tmp_path):
    target = build_text("llama")
    drafter = tiny_drafter(target)
    parts = [f"model.layers.{i}" for i in range(4)] + [
        "model.embed_tokens",
        "model.norm",
        "model.rotary_emb",
        "lm_head",
    ]
    device_map = {part: "disk" if part in offloaded else "cpu" for part in parts}
    dispatch_model(target, device_map, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    assert any(parameter.is_meta for parameter in target.parameters())
    assert_same(target, drafter)


# The drafter


def test_an_offloaded_drafter_is_refused_before_any_work():
    target = tiny_target()
    drafter = tiny_drafter(target)
    cpu_offload(drafter, execution_device=torch.device("cpu"))
    with no_forward(), pytest.raises(ValueError, match="the drafter's weights are offloaded"):
        target.generate(**inputs(), max_new_tokens=8, do_sample=False, assistant_model=drafter)


def draft_logits(target, drafter):
    """The logits of all drafts of one call."""
    return torch.cat([logits[0] for _, _, logits in drafted_rounds(target, drafter)])


def test_a_drafter_in_train_mode_drafts_without_dropout():
    target = tiny_target()
    drafter = tiny_drafter(target, attention_dropout=0.5)
    in_eval_mode = draft_logits(target, drafter)
    assert torch.equal(draft_logits(target, drafter.train()), in_eval_mode)
    assert all(module.training for module in drafter.modules())


# Caches


@pytest.mark.parametrize(
    "implementation",
    [
        "dynamic",
        pytest.param("static", marks=needs_static_rollback),
        pytest.param(
            "offloaded",
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="offloaded caches need an accelerator"),
        ),
    ],
)
def test_cache_implementations(implementation):
    device = "cuda" if implementation == "offloaded" else "cpu"
    target = tiny_target().to(device)
    prompt = {name: value.to(device) for name, value in inputs().items()}
    assert_same(target, tiny_drafter(target).to(device), cache_implementation=implementation, **prompt)


@needs_static_rollback
@pytest.mark.parametrize("max_new_tokens", range(1, 13))
def test_a_static_cache_is_never_overrun(max_new_tokens):
    target = tiny_target()
    assert_same(target, tiny_drafter(target), cache_implementation="static", max_new_tokens=max_new_tokens)


class RoundedLayer(QuantizedLayer):
    """A quantised cache layer that needs no other package."""

    def _quantize(self, tensor, axis):
        return tensor.half()

    def _dequantize(self, tensor):
        return tensor.float()


REFUSED_CACHES = {
    "quantized": ("qwen3", dict(cache_implementation="quantized"), "cache_implementation='quantized'"),
    "quantized layers": ("qwen3", {CACHE: Cache(layers=[RoundedLayer() for _ in range(4)])}, "RoundedLayer"),
    "static sliding": ("mistral", dict(cache_implementation="static"), "StaticSlidingWindowLayer in the cache of"),
}
if not StaticLayer.is_croppable:
    REFUSED_CACHES["static"] = ("qwen3", dict(cache_implementation="static"), "StaticLayer in the cache of")


@pytest.mark.parametrize("name, setting, reason", REFUSED_CACHES.values(), ids=REFUSED_CACHES)
def test_caches_that_cannot_be_rolled_back_are_refused_before_any_work(name, setting, reason):
    target = text_target(name)
    drafter = tiny_drafter(target)
    with no_forward(), pytest.raises(ValueError, match="can't be used here") as error:
        target.generate(**inputs(), max_new_tokens=8, do_sample=False, assistant_model=drafter, **setting)
    assert reason in str(error.value)


def key_shapes(outputs):
    return [tuple(layer.keys.shape) for layer in outputs[CACHE].layers]


def end_on(token):
    """A stopping criterion that only hf_domino looks at inside a block."""

    def criterion(input_ids, scores):
        return input_ids[:, -1] == token

    return criterion


@pytest.mark.parametrize("prompt_length", [7, 20], ids=["prompt_in_the_window", "prompt_beyond_the_window"])
@pytest.mark.parametrize("stop", [None, "eos", "criterion"])
@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "gpt_oss"])
def test_the_returned_cache_is_that_of_plain_decoding(name, stop, prompt_length):
    """Sliding layers are back at their window and don't go on recording, also after a stop inside a block."""
    target = text_target(name)
    drafter = tiny_drafter(target)
    kwargs = dict(inputs(prompt_length), do_sample=False, max_new_tokens=24, return_dict_in_generate=True)
    text = target.generate(**kwargs).sequences[0, prompt_length:]
    # A token that comes up first inside the second block: the first token is the prompt's, and blocks have nine.
    last = int(next(text[i] for i in range(11, 18) if text[i] not in text[:i]))
    kwargs |= {None: {}, "eos": dict(eos_token_id=last), "criterion": dict(stopping_criteria=[end_on(last)])}[stop]
    plain = target.generate(**kwargs)
    with oracle(text, 1.0):
        assisted = target.generate(**kwargs, assistant_model=drafter)
    assert torch.equal(plain.sequences, assisted.sequences)
    assert key_shapes(plain) == key_shapes(assisted)
    for ours, theirs in zip(assisted[CACHE].layers, plain[CACHE].layers):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(ours.values, theirs.values, rtol=1e-3, atol=1e-3)

    plain, assisted = (go_on(target, turn) for turn in (plain, assisted))
    assert torch.equal(plain.sequences, assisted.sequences)
    assert key_shapes(plain) == key_shapes(assisted)


def go_on(target, turn):
    """Plain decoding of a next turn, with the cache of the last one."""
    ids = torch.cat([turn.sequences, inputs(5, seed=3)["input_ids"]], dim=1)
    kwargs = dict(attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
    return target.generate(ids, **kwargs, return_dict_in_generate=True, **{CACHE: turn[CACHE]})
