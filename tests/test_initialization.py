"""DominoDrafter.from_target: layers that start as the target's own."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from hf_domino import DominoDrafter
from hf_domino.target import Target
from hf_domino.training.features import compute_features
from tests.tiny import assert_same_as_plain, inputs

SIZES = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    initializer_range=0.3,
    max_position_embeddings=512,
    pad_token_id=0,
)
FIELDS = dict(mask_token_id=96, block_size=4, causal_state_size=16, correction_rank=8)


def model(config_class, **fields):
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config_class(**{**SIZES, **fields})).eval()
    with torch.no_grad():  # biases and norms that are not their defaults
        for name, parameter in target.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
    return target


@pytest.mark.parametrize(
    "config_class, fields",
    [
        (LlamaConfig, {}),
        (LlamaConfig, {"attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}),
        (Qwen2Config, {}),
        (Qwen3Config, {"head_dim": 16}),
    ],
)
def test_the_copied_layer_is_the_targets(config_class, fields):
    """With one copied layer that attends causally, and the target's own states in the block, nothing differs."""
    target = model(config_class, **fields)
    drafter = DominoDrafter.from_target(target, num_hidden_layers=1, is_causal=True, **FIELDS).eval()
    assert drafter.config.use_qk_norm == (config_class is Qwen3Config)
    assert drafter.config.target_layer_ids == [4]
    ids = inputs(12)["input_ids"]
    features, final = compute_features(Target(target), ids, torch.ones_like(ids), [4], last_hidden=True)
    with torch.no_grad():
        ours = drafter(features[:, 8:], features[:, :8])
    torch.testing.assert_close(ours, final[:, 8:], rtol=1e-4, atol=1e-4)


def test_defaults_overrides_and_generation():
    target = model(LlamaConfig)
    drafter = DominoDrafter.from_target(target, num_hidden_layers=2, **FIELDS)
    assert drafter.dtype == torch.float32 and drafter.config.target_layer_ids == [1, 3]
    for own, theirs in zip(drafter.layers, target.model.layers[-2:]):
        assert torch.equal(own.mlp.down_proj.weight, theirs.mlp.down_proj.weight)
    assert torch.equal(drafter.fc.weight[:, 32:], torch.eye(32)) and not drafter.fc.weight[:, :32].any()
    assert torch.equal(drafter.hidden_norm.weight, target.model.layers[4].input_layernorm.weight)
    assert torch.equal(drafter.norm.weight, target.model.norm.weight)
    assert DominoDrafter.from_target(target, **FIELDS).config.num_hidden_layers == 5

    other = DominoDrafter.from_target(target, num_hidden_layers=2, target_layer_ids=[0, 2], head="none", **FIELDS)
    assert torch.equal(other.fc.weight[:, 32:], torch.eye(32)) and other.config.head == "none"
    assert_same_as_plain(target, drafter.eval(), **inputs())


@pytest.mark.parametrize(
    "config_class, fields, match",
    [
        (GPT2Config, {}, "there is no layers.self_attn"),
        (MixtralConfig, {}, "mlp.gate_proj.weight is missing"),
        (Phi3Config, {}, "there is no layers.self_attn.q_proj"),
        (Gemma2Config, {}, "pre_feedforward_layernorm.weight has no place"),
        (GemmaConfig, {}, "input_layernorm computes something else"),
        (GraniteConfig, {"residual_multiplier": 0.5}, "they use residual_multiplier"),
        (GraniteConfig, {"attention_multiplier": 0.5}, "they scale attention by 0.5"),
        (LlamaConfig, {"mlp_bias": True}, "mlp.gate_proj.bias has no place"),
    ],
)
def test_what_does_not_fit_is_named(config_class, fields, match):
    with pytest.raises(ValueError, match=match):
        DominoDrafter.from_target(model(config_class, **fields), **FIELDS)


def test_more_layers_than_the_target_has():
    with pytest.raises(ValueError, match="num_hidden_layers is 7, but the target has 6 layers"):
        DominoDrafter.from_target(model(LlamaConfig), num_hidden_layers=7, **FIELDS)
    with pytest.raises(ValueError, match=r"self_attn.q_proj.weight is \(32, 32\) but must be \(64, 32\)"):
        DominoDrafter.from_target(model(LlamaConfig), head_dim=16, **FIELDS)
