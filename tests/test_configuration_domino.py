"""DominoConfig: every field is checked when it is built, and a configuration fits its target and survives JSON."""

import json

import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    Gemma3Config,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen3Config,
    T5Config,
)

from hf_domino import DominoConfig
from hf_domino.configuration_domino import evenly_spread_layers

FIELDS = dict(
    vocab_size=97,
    mask_token_id=96,
    target_layer_ids=[0, 2],
    num_target_layers=4,
    block_size=8,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    eos_token_id=[5, 6],
)
SLIDING = ["full_attention", "sliding_attention"]


def config(**overrides):
    return DominoConfig(**{**FIELDS, **overrides})


# Validation


@pytest.mark.parametrize(
    ("field", "low", "high"),
    [
        ("hidden_size", 1, 65536),
        ("target_hidden_size", 1, 65536),
        ("intermediate_size", 1, 2**20),
        ("num_hidden_layers", 1, 128),
        ("num_attention_heads", 1, 1024),
        ("num_key_value_heads", 1, 1024),
        ("head_dim", 2, 4096),
        ("max_position_embeddings", 1, 2**30),
        ("block_size", 2, 1024),
        ("vocab_size", 2, 2**24),
        ("num_uncorrected_tokens", 0, 1024),
        ("causal_state_size", 1, 65536),
        ("correction_rank", 1, 65536),
    ],
)
def test_sizes_are_integers_in_a_range(field, low, high):
    for value in (low - 1, high + 1, 10**30, -1, 4.0, "4", True, [4], {}):
        with pytest.raises(ValueError, match=rf"DominoConfig\.{field} must be an integer from {low} to {high}, but is"):
            config(**{field: value})


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("rms_norm_eps", [-1e-6, 2, "1e-6", None, float("nan")]),
        ("initializer_range", [-0.1, float("inf"), "x", None]),
        ("attention_dropout", [-0.1, 1.5, True]),
        ("hidden_act", ["nonsense", None, 1]),
        ("head", ["eagle", "Domino", None, True]),
        ("sample_from_anchor", [None, 1, "true"]),
        ("use_qk_norm", [None, 0, "no"]),
        ("attention_bias", [None, 1]),
        ("is_causal", [1, "true", []]),
        ("num_target_layers", [0, 4097, "4", 4.0]),
        (
            "layer_types",
            [["full_attention"], ["full_attention"] * 3, ["full_attention", "linear"], "full", 2, [[], []]],
        ),
        ("target_layer_ids", [[], [4], [-1], [0, 0], [0.0], [True], "02", 2, [[0]], [0, 1, 2, 3, 4], range(2)]),
        ("dtype", ["nonsense", "load", "int8", 16]),
    ],
)
def test_other_fields_are_of_their_kind(field, bad):
    for value in bad:
        with pytest.raises(ValueError, match=rf"DominoConfig\.{field} must be .* but is "):
            config(**{field: value})


@pytest.mark.parametrize("field", ["vocab_size", "mask_token_id"])
def test_what_only_the_target_knows_must_be_given(field):
    with pytest.raises(ValueError, match=rf"DominoConfig\.{field} must be an integer .* but is None"):
        config(**{field: None})


def test_target_layer_ids_need_the_layers_or_their_number():
    with pytest.raises(ValueError, match=r"target_layer_ids must be a list of distinct layer ids .* but is None"):
        config(target_layer_ids=None, num_target_layers=None)
    assert config(target_layer_ids=[4095], num_target_layers=None).target_layer_ids == [4095]
    assert config(target_layer_ids=None, num_target_layers=36, num_hidden_layers=5).target_layer_ids == [
        1,
        9,
        17,
        25,
        33,
    ]


@pytest.mark.parametrize("mask", [None, -1, 97, 10**9, "96", 96.0, True])
def test_mask_token_is_a_row_of_the_vocabulary(mask):
    with pytest.raises(ValueError, match=r"mask_token_id must be an integer from 0 to 96 \(vocab_size - 1\), but is"):
        config(mask_token_id=mask)


@pytest.mark.parametrize("eos", [96, [5, 96], (96,)])
def test_mask_token_is_never_an_end_of_sequence(eos):
    with pytest.raises(ValueError, match="mask_token_id must be an id that the target never emits"):
        config(eos_token_id=eos)


def test_fields_that_depend_on_one_another():
    with pytest.raises(
        ValueError, match=r"num_key_value_heads must be a divisor of num_attention_heads \(4\), but is 3"
    ):
        config(num_key_value_heads=3)
    with pytest.raises(ValueError, match="head_dim must be even, for rotary positions, but is 7"):
        config(head_dim=7)
    for window in (None, 7, 8.0, True):
        with pytest.raises(ValueError, match=r"sliding_window must be an integer of at least block_size \(8\)"):
            config(layer_types=SLIDING, sliding_window=window)
    assert config(layer_types=SLIDING, sliding_window=8).sliding_window == 8


@pytest.mark.parametrize(
    "rope",
    [
        "default",
        [],
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "longrope", "factor": 2.0},
        {"rope_type": []},
        {"rope_type": "yarn"},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0},
        {"rope_type": "linear", "factor": -2},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0},
        {"rope_type": "yarn", "factor": 2.0, "mscale": float("nan")},
        {"rope_type": "default", "rope_theta": 0},
        {"rope_type": "default", "rope_theta": "10000"},
        {"rope_type": "default", "rope_theta": 10**400},
        {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}},
    ],
    ids=str,
)
def test_rotary_positions_are_of_a_kind_that_never_changes(rope):
    with pytest.raises(ValueError, match=r"DominoConfig\.rope_parameters must be "):
        config(rope_parameters=rope)


def test_messages_are_short():
    with pytest.raises(ValueError, match="layer_types") as error:
        config(layer_types=["full_attention"] * 10**6)
    assert len(str(error.value)) < 500


def test_defaults():
    built = config(num_key_value_heads=None)
    assert built.num_key_value_heads == built.num_attention_heads == 4
    assert (built.head_dim, built.target_hidden_size) == (8, 32)
    assert built.layer_types == ["full_attention"] * 2


# What follows from the fields


@pytest.mark.parametrize(("sample_from_anchor", "drafts", "first"), [(True, 8, 0), (False, 7, 1)])
def test_number_of_drafts_follows_from_block_and_alignment(sample_from_anchor, drafts, first):
    built = config(sample_from_anchor=sample_from_anchor)
    assert (built.num_draft_tokens, built.first_draft_slot) == (drafts, first)


@pytest.mark.parametrize(("depth", "ids"), [(36, [1, 9, 17, 25, 33]), (64, [1, 16, 31, 46, 61])])
def test_target_layers_are_those_of_the_public_drafters(depth, ids):
    assert evenly_spread_layers(depth, 5) == ids


@pytest.mark.parametrize("depth", range(1, 7))
@pytest.mark.parametrize("count", range(1, 7))
def test_target_layers_of_shallow_targets(depth, count):
    ids = evenly_spread_layers(depth, count)
    assert ids == sorted(set(ids))
    assert 1 <= len(ids) <= count
    assert 0 <= ids[0] <= ids[-1] < depth


# Fitting a target


def test_for_target_takes_the_sizes_of_the_target():
    target = Qwen3Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=72,
        num_hidden_layers=36,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        eos_token_id=96,
    )
    built = DominoConfig.for_target(target)
    assert built.target_layer_ids == [1, 9, 17, 25, 33]
    assert (built.vocab_size, built.num_target_layers, built.num_hidden_layers) == (97, 36, 5)
    assert (built.hidden_size, built.target_hidden_size, built.intermediate_size) == (32, 32, 72)
    assert (built.num_attention_heads, built.num_key_value_heads, built.head_dim) == (4, 2, 16)
    assert (built.rms_norm_eps, built.max_position_embeddings) == (1e-5, 512)
    assert built.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}
    assert (built.eos_token_id, built.mask_token_id) == (96, 95)


@pytest.mark.parametrize(
    ("target", "width", "heads", "kv_heads", "layers"),
    [
        (GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=50), 32, 4, 4, 3),
        (LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1), 32, 4, 1, 2),
        (OPTConfig(hidden_size=64, word_embed_proj_dim=32, num_hidden_layers=2, num_attention_heads=4), 32, 4, 4, 2),
        (Qwen2_5_VLConfig(), 8192, 64, 8, 80),
        (Gemma3Config(), 2304, 8, 4, 26),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_for_target_of_many_families(target, width, heads, kv_heads, layers):
    built = DominoConfig.for_target(target)
    text = target.get_text_config(decoder=True)
    assert (built.hidden_size, built.target_hidden_size) == (width, text.hidden_size)
    assert (built.num_attention_heads, built.num_key_value_heads, built.num_target_layers) == (heads, kv_heads, layers)
    assert built.vocab_size == text.vocab_size


def test_for_target_refuses_an_encoder_decoder():
    with pytest.raises(ValueError, match="needs a decoder-only target, but 't5' is an encoder-decoder"):
        DominoConfig.for_target(T5Config())


def test_for_target_refuses_what_has_no_sizes():
    with pytest.raises(ValueError, match="'vit' has no usable vocab_size"):
        DominoConfig.for_target(AutoConfig.for_model("vit"))


def test_for_target_overrides_win():
    built = DominoConfig.for_target(Qwen3Config(), mask_token_id=7, block_size=4, target_layer_ids=[3], head="none")
    assert (built.mask_token_id, built.block_size, built.target_layer_ids, built.head) == (7, 4, [3], "none")
    with pytest.raises(ValueError, match=r"DominoConfig\.block_size"):
        DominoConfig.for_target(Qwen3Config(), block_size=1)


def tokenizer(words, special=(), chat_template=None, **named):
    vocabulary = {word: i for i, word in enumerate(words)}
    built = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token=words[0])), **named)
    built.add_special_tokens({"extra_special_tokens": [AddedToken(token, special=True) for token in special]})
    built.chat_template = chat_template
    return built


@pytest.mark.parametrize(
    ("size", "special", "template", "mask"),
    [
        # A row of the vocabulary that is no token.
        (16, ["<a>", "<b>"], None, 10),
        # No such row: the last special token that chats don't use.
        (10, ["<a>", "<b>"], None, 9),
        (10, ["<a>", "<b>"], "{{ '<b>' + messages }}", 8),
        # None of these either: the last id that is no end of sequence.
        (8, [], None, 6),
    ],
)
def test_for_target_finds_a_mask_token_that_is_not_in_use(size, special, template, mask):
    words = ["<unk>", *"abcdef", "<eos>"]
    target = Qwen3Config(vocab_size=size, eos_token_id=7)
    built = DominoConfig.for_target(target, tokenizer(words, special, template, eos_token="<eos>"))
    assert built.mask_token_id == mask


def test_for_target_never_masks_with_the_tokenizers_own_end_of_sequence():
    target = Qwen3Config(vocab_size=10, eos_token_id=None)
    ending = tokenizer(["<unk>", *"abcdefg"], ["<a>", "<b>"], eos_token="<b>", pad_token="<a>")
    assert len(ending) == 10
    assert DominoConfig.for_target(target, ending).mask_token_id == 7


# JSON


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        dict(sample_from_anchor=False, num_uncorrected_tokens=0, causal_state_size=16, correction_rank=8),
        dict(head="none", is_causal=False, use_qk_norm=False, dtype="bfloat16"),
        dict(layer_types=SLIDING, sliding_window=16, is_causal=True),
        dict(rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "mscale_all_dim": 0}),
    ],
    ids=str,
)
def test_round_trip(tmp_path, overrides):
    built = config(**overrides)
    assert DominoConfig.from_dict(built.to_dict()).to_dict() == built.to_dict()
    built.save_pretrained(tmp_path)
    for loaded in (DominoConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is DominoConfig
        ignored = {"_name_or_path", "auto_map"}
        assert {k: v for k, v in loaded.to_dict().items() if k not in ignored} == {
            k: v for k, v in built.to_dict().items() if k not in ignored
        }


def test_file_says_everything_that_another_reader_needs(tmp_path):
    config().save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == "domino"
    for field, value in FIELDS.items():
        assert written[field] == value
    del written["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match=r"DominoConfig\.vocab_size must be an integer"):
        DominoConfig.from_pretrained(tmp_path)


def test_legacy_rotary_fields():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    with_scaling = DominoConfig.from_dict({**FIELDS, "rope_theta": 5e6, "rope_scaling": scaling})
    assert with_scaling.rope_parameters == {**scaling, "rope_theta": 5e6}
    without = DominoConfig.from_dict({**FIELDS, "rope_theta": 1000000, "rope_scaling": None})
    assert without.rope_parameters == {"rope_type": "default", "rope_theta": 1000000}


def test_overrides_at_load_are_checked_too(tmp_path):
    config().save_pretrained(tmp_path)
    assert DominoConfig.from_pretrained(tmp_path, block_size=4).block_size == 4
    with pytest.raises(ValueError, match=r"DominoConfig\.block_size must be an integer from 2 to 1024, but is 1"):
        DominoConfig.from_pretrained(tmp_path, block_size=1)


def test_keys_of_a_file_that_are_no_fields_are_not_taken_over():
    """transformers' own switches among them: other weights, attention kernels, memory for any number of labels."""
    hostile = dict(num_labels=7, transformers_weights="other.bin", attn_implementation="a/kernel", sub_configs=1)
    hostile |= dict(architectures=1, transformers_version=[])
    built = DominoConfig.from_dict({**FIELDS, **hostile, "num_draft_tokens": 3})
    assert built.num_draft_tokens == 8
    assert built.num_labels == 2
    assert built._attn_implementation is None
    assert not hasattr(built, "transformers_weights")


def test_dtype_is_that_of_torch():
    assert config(dtype="bfloat16").dtype is torch.bfloat16
    assert DominoConfig.from_dict({**FIELDS, "torch_dtype": "float16"}).dtype is torch.float16
