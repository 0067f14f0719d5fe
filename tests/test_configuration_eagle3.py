"""Eagle3Config: every field is checked when it is built, and a configuration fits its target and survives JSON."""

import json

import pytest
from transformers import AutoConfig, Gemma3Config, GPT2Config, LlamaConfig, OPTConfig, Qwen2_5_VLConfig, T5Config

from hf_domino import Eagle3Config, Eagle3Drafter
from hf_domino.configuration_eagle3 import usual_layers

from .tiny import tiny_eagle3, tiny_target

FIELDS = dict(vocab_size=97, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)


def config(**overrides):
    return Eagle3Config(**{**FIELDS, **overrides})


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("vocab_size", [None, 1, 2**25, "97"]),
        ("num_draft_tokens", [0, 65, 2.0, None, True]),
        ("draft_vocabulary_size", [1, 98, "all"]),
        ("norm_before_residual", [None, 1, "no"]),
        ("use_qk_norm", [None, 0]),
        ("num_target_layers", [0, 4097, "4"]),
        ("target_layer_ids", [[], [-1], [0, 0], [4096], "02", 2]),
        ("head_dim", [7, 0]),
        ("num_key_value_heads", [3]),
        ("dtype", ["int8", "load"]),
        ("rope_parameters", [{"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, {"full_attention": {}}]),
    ],
)
def test_fields_are_of_their_kind(field, bad):
    for value in bad:
        with pytest.raises(ValueError, match=rf"Eagle3Config\.{field} must be .* but is "):
            config(**{field: value})


def test_layers_are_those_of_the_target_unless_they_are_named():
    """They count outputs: what enters layers 2, 16 and 29 of 32 comes out of the ones before."""
    assert usual_layers(32) == [1, 15, 28] and usual_layers(36) == [1, 17, 32]
    assert config().feature_layers(32) == [1, 15, 28] and config().num_features == 3 * 32
    named = config(target_layer_ids=[5, 1], target_hidden_size=48)
    assert named.feature_layers(32) == [5, 1] and named.num_features == 2 * 48
    with pytest.raises(ValueError, match=r"target_layer_ids must be .* from 0 to 3, but is \[4\]"):
        config(target_layer_ids=[4], num_target_layers=4)


def test_a_draft_vocabulary_of_every_token_is_none():
    assert config(draft_vocabulary_size=97).draft_vocabulary_size is None
    assert Eagle3Drafter(config(draft_vocabulary_size=97)).d2t is None


def test_it_survives_json(tmp_path):
    written = config(draft_vocabulary_size=23, num_draft_tokens=7, norm_before_residual=True, target_layer_ids=[2, 0])
    written.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "eagle3"
    read = AutoConfig.from_pretrained(tmp_path)
    assert type(read) is Eagle3Config
    assert all(getattr(read, name) == getattr(written, name) for name in Eagle3Config.own_fields())


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (
            LlamaConfig(num_hidden_layers=32),
            dict(hidden_size=4096, head_dim=128, num_target_layers=32),
        ),
        (GPT2Config(), dict(hidden_size=768, intermediate_size=3072, num_attention_heads=12, vocab_size=50257)),
        (OPTConfig(word_embed_proj_dim=512), dict(hidden_size=512, target_hidden_size=768)),
        (Qwen2_5_VLConfig(), dict(hidden_size=8192, num_target_layers=80)),
        (Gemma3Config(), dict(hidden_size=2304, head_dim=256)),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_for_target(target, expected):
    made = Eagle3Config.for_target(target, draft_vocabulary_size=100)
    assert made.draft_vocabulary_size == 100 and made.feature_layers(8) == [1, 3, 4]
    for name, value in expected.items():
        assert getattr(made, name) == value, name


def test_no_target_no_configuration():
    with pytest.raises(ValueError, match="needs a decoder-only target, but 't5' is an encoder-decoder"):
        Eagle3Config.for_target(T5Config())


def test_a_new_drafter_drafts_the_first_tokens_of_the_vocabulary():
    drafter = Eagle3Drafter(config(draft_vocabulary_size=23))
    assert drafter.draft_vocabulary.tolist() == list(range(23))
    assert drafter.t2d.nonzero().flatten().tolist() == list(range(23))
    drafter = tiny_eagle3(tiny_target(), draft_vocabulary_size=23)
    assert drafter.t2d.nonzero().flatten().tolist() == drafter.draft_vocabulary.tolist() != list(range(23))
