"""Checkpoints of every public layout load as published, and nothing that is damaged or hostile does."""

import json
import pickle
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, Qwen3Config

import hf_domino
from hf_domino import DominoDrafter
from tests.hub_stand_in import run_beside_a_hub
from tests.tiny import MASK, VOCAB, assert_same_as_plain, inputs, tiny_target

BACKBONE = dict(
    attention_bias=False,
    attention_dropout=0.0,
    bos_token_id=1,
    eos_token_id=2,
    head_dim=8,
    hidden_act="silu",
    hidden_size=32,
    initializer_range=0.02,
    intermediate_size=64,
    max_position_embeddings=512,
    num_attention_heads=4,
    num_hidden_layers=2,
    num_key_value_heads=2,
    rms_norm_eps=1e-06,
    vocab_size=VOCAB,
)
LAYERS = dict(layer_types=["full_attention"] * 2, sliding_window=None, use_sliding_window=False, max_window_layers=2)
SLIDING = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=16)
TARGET = {"mask_token_id": MASK, "target_layer_ids": [0, 2]}
HEAD = dict(projector_type="domino", pure_draft_prefix_len=1, emb_dim=8, gru_hidden_dim=16, shift_label=True)
# z-lab's and SpecForge's file: a Qwen3 with the drafter's fields under dflash_config.
PUBLISHED = dict(
    **BACKBONE,
    **LAYERS,
    architectures=["DFlashDraftModel"],
    auto_map={"AutoModel": "dflash.DFlashDraftModel"},
    block_size=8,
    dtype="float32",
    model_type="qwen3",
    num_target_layers=4,
    rope_scaling=None,
    rope_theta=1000000,
    tie_word_embeddings=False,
    use_cache=True,
)
# vLLM's speculators: the backbone under transformer_layer_config, layer ids one higher.
SPECULATORS = dict(
    architectures=["DFlashDraftModel"],
    speculators_model_type="dflash",
    speculators_config={"algorithm": "dflash", "verifier": {"name_or_path": "someone/target"}},
    aux_hidden_state_layer_ids=[1, 3],
    block_size=8,
    draft_vocab_size=VOCAB,
    dtype="float32",
    mask_token_id=MASK,
    sliding_window_non_causal=False,
    target_hidden_size=None,
    transformer_layer_config=dict(
        **BACKBONE, **LAYERS, model_type="qwen3", rope_parameters={"rope_type": "default", "rope_theta": 1000000}
    ),
)
FIELDS = dict(
    **BACKBONE,
    **TARGET,
    num_target_layers=4,
    block_size=8,
    head="domino",
    sample_from_anchor=True,
    num_uncorrected_tokens=1,
    correction_rank=8,
    causal_state_size=16,
    rope_parameters={"rope_type": "default", "rope_theta": 1000000},
)
NO_HEAD = dict(
    head="none", sample_from_anchor=False, num_uncorrected_tokens=0, correction_rank=256, causal_state_size=1024
)
TARGET_COPIES = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")


def with_layers(config, **layers):
    return {**config, "transformer_layer_config": {**config["transformer_layer_config"], **layers}}


# name -> config.json, the fields in which it differs from FIELDS, the container of the head's tensors, copied tensors
LAYOUTS = {
    "Domino": ({**PUBLISHED, "emb_dim": 8, "dflash_config": {**TARGET, **HEAD}}, {}, "", ()),
    "Domino, early tensor names": ({**PUBLISHED, "dflash_config": {**TARGET, **HEAD}}, {}, "logit_head.", ()),
    "Domino of Qwen3.6": (
        {**PUBLISHED, "dflash_config": {**TARGET, **HEAD, "shift_label": False}, "bos_token_id": None},
        dict(sample_from_anchor=False, bos_token_id=None),
        "",
        (),
    ),
    "Domino, a section for the head": (
        {**PUBLISHED, "dflash_config": {**TARGET, "projector_type": "domino"}, "domino_config": HEAD},
        {},
        "",
        (),
    ),
    "Domino, nothing said of the alignment": (
        {
            **PUBLISHED,
            "dflash_config": {**TARGET, "projector_type": "domino"},
            "domino_config": {"emb_dim": 8, "gru_hidden_dim": 16},
        },
        dict(sample_from_anchor=False, num_uncorrected_tokens=0),
        "",
        (),
    ),
    "DFlash": ({**PUBLISHED, "dflash_config": TARGET}, NO_HEAD, "", ()),
    "DFlash, sliding layers": (
        {
            **{name: value for name, value in PUBLISHED.items() if name not in ("block_size", "rope_theta")},
            **SLIDING,
            "use_sliding_window": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
            "dflash_config": {**TARGET, "block_size": 8},
        },
        {**NO_HEAD, **SLIDING},
        "",
        (),
    ),
    "DFlash, causal": (
        {**PUBLISHED, **SLIDING, "dflash_config": {**TARGET, "causal": True}},
        {**NO_HEAD, **SLIDING, "is_causal": True},
        "",
        (),
    ),
    "DFlash of a deeper target": (
        {**PUBLISHED, "num_target_layers": 9, "dflash_config": {**TARGET, "target_layer_ids": [8, 1, 3]}},
        {**NO_HEAD, "num_target_layers": 9, "target_layer_ids": [8, 1, 3]},
        "",
        (),
    ),
    "speculators DFlash": (
        SPECULATORS,
        {**NO_HEAD, "num_target_layers": None, "num_uncorrected_tokens": 1},
        "",
        TARGET_COPIES,
    ),
    "speculators DFlash from the anchor": (
        {**SPECULATORS, "sample_from_anchor": True},
        {**NO_HEAD, "num_target_layers": None, "num_uncorrected_tokens": 1, "sample_from_anchor": True},
        "",
        (),
    ),
    "speculators DFlash, sliding layers": (
        with_layers(SPECULATORS, **SLIDING),
        {**NO_HEAD, **SLIDING, "num_target_layers": None, "num_uncorrected_tokens": 1},
        "",
        (),
    ),
    "speculators DFlash, bidirectional sliding layers": (
        with_layers({**SPECULATORS, "sliding_window_non_causal": True}, **SLIDING),
        {**NO_HEAD, **SLIDING, "num_target_layers": None, "num_uncorrected_tokens": 1, "is_causal": False},
        "",
        TARGET_COPIES,
    ),
    "speculators DFlash with the Domino projector": (
        {**SPECULATORS, **HEAD, "shift_label": None},
        {"num_target_layers": None},
        "domino_head.",
        TARGET_COPIES,
    ),
    "speculators Domino": (
        {
            **SPECULATORS,
            "speculators_model_type": "domino",
            "sample_from_anchor": True,
            "gru_hidden_dim": 16,
            "logits_correction_emb_dim": 8,
            "pure_draft_prefix_len": 2,
        },
        {"num_target_layers": None, "num_uncorrected_tokens": 2},
        "logits_correction.",
        (),
    ),
}


def by_hand(kind=DominoDrafter, of_kind=FIELDS, **fields):
    """A drafter built from fields, with weights that are nowhere zero."""
    drafter = kind(kind.config_class(**{**of_kind, **fields})).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
    return drafter


def write(folder, config, tensors):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def write_layout(folder, name):
    """Write a tiny checkpoint of a public layout; returns the drafter that it must load as."""
    config, fields, container, copies = LAYOUTS[name]
    drafter = by_hand(**fields)
    tensors = {
        (container + name if name.startswith(("prefix_gru", "embed_proj")) else name): tensor
        for name, tensor in drafter.state_dict().items()
    }
    for copied in copies:
        tensors[copied] = torch.zeros(32) if "norm" in copied else torch.zeros(VOCAB, 32)
    write(folder, config, tensors)
    return drafter


def own_fields(config):
    return {name: getattr(config, name) for name in config.own_fields()}


def assert_same_tensors(loaded, expected):
    assert type(loaded) is type(expected)
    assert own_fields(loaded.config) == own_fields(expected.config)
    assert loaded.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected.state_dict()[name]), name


def assert_same_drafter(loaded, expected):
    assert_same_tensors(loaded, expected)
    generator = torch.Generator().manual_seed(1)
    block = torch.randn(1, 8, 32, generator=generator)
    features = torch.randn(1, 20, expected.fc.in_features, generator=generator)
    base = torch.randn(1, 8, VOCAB, generator=generator)
    # Not to the bit: tensors of a file stand at other addresses, where other kernels may be taken.
    with torch.no_grad():
        torch.testing.assert_close(loaded(block, features), expected(block, features))
        torch.testing.assert_close(
            loaded.teacher_forced(block, base, block), expected.teacher_forced(block, base, block)
        )


# Public layouts


@pytest.mark.parametrize("name", LAYOUTS)
def test_public_checkpoint_loads_as_published(tmp_path, name, caplog):
    expected = write_layout(tmp_path / "public", name)
    loaded, info = DominoDrafter.from_pretrained(tmp_path / "public", output_loading_info=True)
    assert_same_drafter(loaded, expected)
    assert not any(info.values())
    assert "warm start" not in caplog.text

    loaded.save_pretrained(tmp_path / "own")
    assert json.loads((tmp_path / "own" / "config.json").read_text())["model_type"] == "domino"
    assert load_file(tmp_path / "own" / "model.safetensors").keys() == expected.state_dict().keys()
    assert_same_drafter(AutoModel.from_pretrained(tmp_path / "own"), expected)


@pytest.mark.parametrize("name", ["Domino", "DFlash"])
def test_public_checkpoint_drafts(tmp_path, name):
    write_layout(tmp_path, name)
    acceptance = assert_same_as_plain(tiny_target(), DominoDrafter.from_pretrained(tmp_path), rate=1.0, **inputs())
    assert acceptance.mean > 5


def test_config_of_another_class_is_read_all_the_same(tmp_path):
    expected = write_layout(tmp_path, "Domino")
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is Qwen3Config
    assert_same_drafter(DominoDrafter.from_pretrained(tmp_path, config=config), expected)


def test_config_from_elsewhere(tmp_path):
    expected = write_layout(tmp_path / "weights", "Domino")
    by_hand().config.save_pretrained(tmp_path / "config")
    (tmp_path / "weights" / "config.json").unlink()
    assert_same_drafter(DominoDrafter.from_pretrained(tmp_path / "weights", config=tmp_path / "config"), expected)
    assert_same_drafter(DominoDrafter.from_pretrained(tmp_path / "weights", config=by_hand().config), expected)


def test_state_dict_instead_of_files():
    expected = by_hand()
    loaded = DominoDrafter.from_pretrained(None, config=expected.config, state_dict=expected.state_dict())
    assert_same_drafter(loaded, expected)


def test_subfolder_and_shards(tmp_path):
    expected = by_hand()
    expected.save_pretrained(tmp_path / "inner", max_shard_size="10KB")
    assert len(list((tmp_path / "inner").glob("*.safetensors"))) > 1
    assert_same_drafter(DominoDrafter.from_pretrained(tmp_path, subfolder="inner"), expected)


@pytest.mark.parametrize("shard_size", ["1GB", "10KB"])
def test_variant_of_the_weights(tmp_path, shard_size):
    expected = by_hand()
    expected.save_pretrained(tmp_path, variant="fp32", max_shard_size=shard_size)
    assert_same_drafter(DominoDrafter.from_pretrained(tmp_path, variant="fp32"), expected)
    with pytest.raises(ValueError, match=r"has no model\.fp16\.safetensors\."):
        DominoDrafter.from_pretrained(tmp_path, variant="fp16")


@pytest.mark.parametrize(
    "kwargs", [{"device_map": "cpu"}, {"attn_implementation": "eager"}, {"low_cpu_mem_usage": True}]
)
def test_other_arguments_of_from_pretrained(tmp_path, kwargs):
    expected = write_layout(tmp_path, "Domino")
    loaded = DominoDrafter.from_pretrained(tmp_path, **kwargs)
    assert_same_drafter(loaded, expected)
    assert loaded.config._attn_implementation == kwargs.get("attn_implementation", "sdpa")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, "auto", None])
def test_dtype_is_the_files_unless_asked_for(tmp_path, dtype):
    expected = by_hand().to(torch.bfloat16)
    write(tmp_path, {**PUBLISHED, "dtype": "bfloat16", "dflash_config": {**TARGET, **HEAD}}, expected.state_dict())
    loaded = DominoDrafter.from_pretrained(tmp_path, **({} if dtype is None else {"dtype": dtype}))
    assert loaded.dtype == (dtype if isinstance(dtype, torch.dtype) else torch.bfloat16)


# Where fields stand


DRAFTING = {"block_size": 8, "num_target_layers": 4, **TARGET, **HEAD}
ELSEWHERE = {name: value for name, value in PUBLISHED.items() if name not in DRAFTING}


@pytest.mark.parametrize(
    "config",
    [
        {**ELSEWHERE, "dflash_config": DRAFTING},
        {**ELSEWHERE, **DRAFTING},
        {**ELSEWHERE, **TARGET, "block_size": 8, "dflash_config": {**HEAD, "num_target_layers": 4}},
        {**ELSEWHERE, **DRAFTING, "dflash_config": DRAFTING},
    ],
    ids=["nested", "top level", "mixed", "both"],
)
def test_fields_may_stand_at_the_top_or_below(tmp_path, config):
    expected = by_hand()
    write(tmp_path, config, expected.state_dict())
    assert_same_drafter(DominoDrafter.from_pretrained(tmp_path), expected)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 16),
        ("mask_token_id", 95),
        ("target_layer_ids", [0, 3]),
        ("shift_label", False),
        ("sample_from_anchor", False),
        ("emb_dim", 16),
        ("projector_type", "dflash"),
    ],
)
def test_two_places_that_differ_are_an_error(tmp_path, field, value):
    write(tmp_path, {**ELSEWHERE, field: value, "dflash_config": DRAFTING}, by_hand().state_dict())
    with pytest.raises(ValueError, match=rf"one field different values: .*{field} = .* and .*dflash_config\.\w+ = "):
        DominoDrafter.from_pretrained(tmp_path)


def test_layer_ids_counted_in_two_ways_must_agree(tmp_path):
    write(tmp_path, {**SPECULATORS, "target_layer_ids": [0, 2]}, by_hand(**NO_HEAD).state_dict())
    assert DominoDrafter.from_pretrained(tmp_path).config.target_layer_ids == [0, 2]
    write(tmp_path, {**SPECULATORS, "target_layer_ids": [1, 3]}, by_hand(**NO_HEAD).state_dict())
    with pytest.raises(ValueError, match=r"target_layer_ids = \[1, 3\] and aux_hidden_state_layer_ids - 1 = \[0, 2\]"):
        DominoDrafter.from_pretrained(tmp_path)


# With and without a head


def test_base_of_a_domino_checkpoint_alone(tmp_path):
    domino = write_layout(tmp_path, "Domino")
    base, info = DominoDrafter.from_pretrained(tmp_path, head="none", output_loading_info=True)
    assert base.config.head == "none"
    # transformers would print a report of them.
    assert not info["unexpected_keys"] and not info["missing_keys"]
    assert base.state_dict().keys() == {
        name for name in domino.state_dict() if not name.startswith(("prefix", "embed"))
    }
    block = torch.randn(1, 8, 32)
    torch.testing.assert_close(base(block), domino(block))


def test_warm_start_from_a_dflash_checkpoint(tmp_path, caplog):
    dflash = write_layout(tmp_path, "DFlash")
    sizes = dict(causal_state_size=16, correction_rank=8)
    drafter, info = DominoDrafter.from_pretrained(tmp_path, head="domino", **sizes, output_loading_info=True)
    assert set(info["missing_keys"]) == {
        "prefix_gru.weight_ih_l0",
        "prefix_gru.weight_hh_l0",
        "embed_proj.0.weight",
        "embed_proj.2.weight",
    }
    assert "has no Domino head" in caplog.text
    block, base = torch.randn(1, 8, 32), torch.randn(1, 8, VOCAB)
    torch.testing.assert_close(drafter(block), dflash(block))
    assert torch.equal(drafter.teacher_forced(block, base, block), base)
    assert 0 < drafter.prefix_gru.weight_hh_l0.abs().max() <= 16**-0.5


# Refused for what the configuration says


REFUSED = {
    "plain Qwen3": (
        {},
        r"not a drafter .*model_type 'qwen3', architectures \['DFlashDraftModel'\]\) has neither dflash",
    ),
    "no mask token": ({"dflash_config": {"target_layer_ids": [0]}}, r"DominoConfig\.mask_token_id must be an integer"),
    "no target layers": (
        {"dflash_config": {"mask_token_id": 1}, "num_target_layers": None},
        "target_layer_ids must be",
    ),
    "no vocabulary": ({"dflash_config": TARGET, "vocab_size": None}, r"DominoConfig\.vocab_size must be an integer"),
    "reduced vocabulary": (
        {"dflash_config": TARGET, "draft_vocab_size": 32},
        "reduced draft vocabulary, which hf_domino",
    ),
    "unknown projector": ({"dflash_config": {**TARGET, "projector_type": "dspark"}}, "projector_type 'dspark'; only"),
    "unknown norm": ({"dflash_config": {**TARGET, **HEAD, "use_bias_norm": True}}, "config.json sets use_bias_norm"),
    "unknown gate": ({"dflash_config": {**TARGET, **HEAD}, "use_bias_gate": True}, "config.json sets use_bias_gate"),
    "DFlash 2": ({"dflash_config": {**TARGET, "selector_rank": 256}}, "config.json sets selector_rank"),
    "attention sinks": ({"dflash_config": {**TARGET, "attention_sink_bias": True}}, "sets attention_sink_bias"),
    "EAGLE-3": (
        {"architectures": ["LlamaForCausalLMEagle3"]},
        r"an EAGLE-3 drafter, which hf_domino\.Eagle3Drafter\.from_pretrained",
    ),
    "a list for a section": (
        {"dflash_config": [TARGET]},
        "config.json's dflash_config must be an object, but is a list",
    ),
    "a string for a section": ({"dflash_config": "x" * 10**6}, "dflash_config must be an object, but is a str"),
    "layer ids of no kind": (
        {"dflash_config": {**TARGET, "target_layer_ids": {"a": 1}}},
        "target_layer_ids must be a list",
    ),
    "aux ids of no kind": ({"speculators_model_type": "dflash", "aux_hidden_state_layer_ids": ["a"]}, "mask_token_id"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_drafter_of_this_kind_is_refused(tmp_path, case):
    changes, message = REFUSED[case]
    write(tmp_path, {**PUBLISHED, **changes}, by_hand(**NO_HEAD).state_dict())
    with pytest.raises(ValueError, match=message) as error:
        DominoDrafter.from_pretrained(tmp_path)
    assert len(str(error.value)) < 500


ABSURD = {
    "hidden_size": 10**9,
    "intermediate_size": 10**12,
    "num_hidden_layers": 10**6,
    "num_attention_heads": 10**6,
    "vocab_size": 10**12,
    "block_size": 10**9,
    "head_dim": -8,
    "max_position_embeddings": 10**18,
    "emb_dim": 10**9,
    "gru_hidden_dim": -1,
    "layer_types": ["full_attention"] * 10**6,
    "target_layer_ids": list(range(10**6)),
    "rope_theta": "1000000",
    "dtype": "load",
}


@pytest.mark.parametrize("model_type", ["qwen3", "domino"])
@pytest.mark.parametrize("field", ABSURD)
def test_absurd_sizes_are_refused_at_once(tmp_path, field, model_type):
    drafter = by_hand()
    public = {"emb_dim": "correction_rank", "gru_hidden_dim": "causal_state_size"}
    if model_type == "domino":
        config = {**drafter.config.to_dict(), public.get(field, field): ABSURD[field]}
        config.pop("rope_parameters") if field == "rope_theta" else None
    else:
        section = {**TARGET, **HEAD}
        section.pop(field, None)
        config = {**PUBLISHED, field: ABSURD[field], "dflash_config": section}
    write(tmp_path, config, drafter.state_dict())
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"DominoConfig\.\w+ must be .*, but is ") as error:
        DominoDrafter.from_pretrained(tmp_path)
    assert time.monotonic() - start < 10
    assert len(str(error.value)) < 1000


def test_sizes_that_no_machine_holds_are_compared_with_the_file_first(tmp_path):
    """Each is within its range; together they ask for hundreds of terabytes."""
    huge = dict(
        hidden_size=2**16, intermediate_size=2**20, num_hidden_layers=128, num_attention_heads=512, head_dim=128
    )
    drafter = by_hand()
    config = {**drafter.config.to_dict(), **huge, "layer_types": None, "target_hidden_size": None}
    write(tmp_path, config, drafter.state_dict())
    with pytest.raises(ValueError, match=r"don't fit its configuration: .*has shape .* instead of .*; and \d+ more\."):
        DominoDrafter.from_pretrained(tmp_path)


def test_overrides_are_checked_like_the_file(tmp_path):
    by_hand().save_pretrained(tmp_path)
    for load in (DominoDrafter.from_pretrained, AutoModel.from_pretrained):
        assert load(tmp_path, block_size=4).config.num_draft_tokens == 4
        with pytest.raises(ValueError, match=r"DominoConfig\.block_size must be an integer from 2 to 1024, but is 1\."):
            load(tmp_path, block_size=1)


# Refused for what the weights are


def change_nothing(tensors):
    pass


def drop(*names):
    return lambda tensors: [tensors.pop(name) for name in names]


def put(name, *shape, dtype=torch.float32):
    return lambda tensors: tensors.update({name: torch.zeros(shape, dtype=dtype)})


DAMAGED = {
    "a missing tensor": (drop("fc.weight"), r"fc\.weight is missing\."),
    "half a head": (drop("prefix_gru.weight_ih_l0"), r"prefix_gru\.weight_ih_l0 is missing\."),
    "the other half": (
        drop("embed_proj.0.weight", "embed_proj.2.weight"),
        r"embed_proj\.0\.weight is missing; embed_proj\.2\.weight is missing\.",
    ),
    "a wrong shape": (put("fc.weight", 32, 96), r"fc\.weight has shape \[32, 96\] instead of \[32, 64\]\."),
    "a wrong shape in the head": (put("embed_proj.2.weight", 50, 8), r"has shape \[50, 8\] instead of \[97, 8\]\."),
    "another type": (put("norm.weight", 32, dtype=torch.int8), r"norm\.weight holds I8 instead of floating point"),
    "a GRU with biases": (put("prefix_gru.bias_ih_l0", 48), r"prefix_gru\.bias_ih_l0 is no tensor of this drafter\."),
    "a tensor of DFlash 2": (put("layers.0.attn_conv.base", 2, 32), r"layers\.0\.attn_conv\.base is no tensor of this"),
    "one layer more": (put("layers.2.mlp.up_proj.weight", 64, 32), r"layers\.2\.mlp\.up_proj\.weight is no tensor"),
    "a vocabulary map": (
        put("d2t", 32, dtype=torch.int64),
        "d2t maps a reduced draft vocabulary, which hf_domino does",
    ),
    "the head twice": (put("logit_head.embed_proj.0.weight", 8, 48), r"embed_proj\.0\.weight is there twice"),
    "nothing": (lambda tensors: tensors.clear(), r"fc\.weight is missing; .*; and \d+ more\."),
}


@pytest.mark.parametrize("case", DAMAGED)
@pytest.mark.parametrize("layout", ["Domino", "own"])
def test_weights_that_do_not_fit_are_refused(tmp_path, case, layout):
    damage, message = DAMAGED[case]
    drafter = by_hand()
    tensors = dict(drafter.state_dict())
    damage(tensors)
    write(tmp_path, LAYOUTS["Domino"][0] if layout == "Domino" else drafter.config.to_dict(), tensors)
    for load in (DominoDrafter.from_pretrained, *([AutoModel.from_pretrained] if layout == "own" else [])):
        with pytest.raises(ValueError, match=f"don't fit its configuration: .*{message}"):
            load(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: data[:4],
        lambda data: b"",
        lambda data: b"\xff" * 100,
        lambda data: (10**15).to_bytes(8, "little") + data[8:],
        lambda data: pickle.dumps({"fc.weight": [0.0]}),
        lambda data: data.replace(b'"F32"', b'"F99"', 1),
    ],
    ids=["half", "cut", "no header", "empty", "garbage", "huge header", "pickle", "unknown type"],
)
def test_damaged_file_is_refused(tmp_path, damage):
    write_layout(tmp_path, "Domino")
    file = tmp_path / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=r"model\.safetensors of .* is not a readable safetensors file: "):
        DominoDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ("{", ValueError, "config.json of .* is not valid JSON"),
        ("", ValueError, "config.json of .* is not valid JSON"),
        (b"\xff\xfe\x00", ValueError, "config.json of .* is not valid JSON"),
        ("[" * 10**5, ValueError, "config.json of .* is not valid JSON"),
        ("[1]", ValueError, "config.json of .* must hold an object, but holds a list"),
        ("null", ValueError, "config.json of .* must hold an object, but holds a NoneType"),
        (None, OSError, r"has no config\.json\."),
    ],
    ids=["broken", "empty", "not text", "nested", "list", "null", "missing"],
)
def test_config_that_is_none_is_refused(tmp_path, content, error, message):
    write_layout(tmp_path, "Domino")
    file = tmp_path / "config.json"
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(error, match=message):
        DominoDrafter.from_pretrained(tmp_path)


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda index: "{", f"{INDEX} of .* is not valid JSON"),
        (lambda index: [], f"{INDEX} of .* must hold an object"),
        (lambda index: {}, f"{INDEX} of .* has no weight_map or no metadata"),
        (lambda index: {**index, "metadata": 1}, f"{INDEX} of .* has no weight_map or no metadata"),
        (lambda index: {**index, "weight_map": {"fc.weight": "x.bin"}}, "names 'x.bin', not a safetensors file"),
        (lambda index: {**index, "weight_map": {"fc.weight": "../x.safetensors"}}, r"names '\.\./x\.safetensors', not"),
        (lambda index: {**index, "weight_map": {"fc.weight": 1}}, "names 1, not a safetensors file"),
        (lambda index: {**index, "weight_map": {"fc.weight": "x.safetensors"}}, r"have a file named x\.safetensors"),
    ],
    ids=["broken", "list", "empty", "metadata", "pickle", "outside", "number", "missing shard"],
)
def test_damaged_index_is_refused(tmp_path, damage, message):
    by_hand().save_pretrained(tmp_path, max_shard_size="10KB")
    damaged = damage(json.loads((tmp_path / INDEX).read_text()))
    (tmp_path / INDEX).write_text(damaged if isinstance(damaged, str) else json.dumps(damaged))
    with pytest.raises((ValueError, OSError), match=message):
        DominoDrafter.from_pretrained(tmp_path)


def test_missing_shard_is_refused(tmp_path):
    by_hand().save_pretrained(tmp_path, max_shard_size="10KB")
    next(tmp_path.glob("model-00002-*")).unlink()
    with pytest.raises(OSError, match="does not appear to have a file named model-00002"):
        DominoDrafter.from_pretrained(tmp_path)


# Nothing of a folder is run


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


@pytest.mark.parametrize("file", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
@pytest.mark.parametrize("load", [DominoDrafter.from_pretrained, AutoModel.from_pretrained])
def test_pickles_are_not_read(tmp_path, file, load):
    marker, bomb = tmp_path / "marker", pickle.dumps(Bomb(tmp_path / "marker"))
    by_hand().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / file).write_bytes(bomb)
    with pytest.raises(ValueError, match=f"has no model.safetensors, only {file}, a pickle that could run code"):
        load(tmp_path)
    assert not marker.exists()
    pickle.loads(bomb).close()
    assert marker.exists()


def test_other_weight_files_are_not_taken_instead(tmp_path):
    by_hand().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="safetensors only; use_safetensors=False is not supported"):
        DominoDrafter.from_pretrained(tmp_path, use_safetensors=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "transformers_weights": "other.safetensors"}))
    save_file({"fc.weight": torch.zeros(1)}, tmp_path / "other.safetensors")
    assert_same_drafter(DominoDrafter.from_pretrained(tmp_path), by_hand())
    assert_same_drafter(AutoModel.from_pretrained(tmp_path), by_hand())


def test_code_of_a_folder_is_not_run(tmp_path):
    expected = write_layout(tmp_path, "Domino")
    (tmp_path / "dflash.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')\n")
    assert_same_drafter(DominoDrafter.from_pretrained(tmp_path), expected)
    assert_same_drafter(DominoDrafter.from_pretrained(tmp_path, trust_remote_code=True), expected)
    assert not (tmp_path / "marker").exists()


# The Hub


ON_THE_HUB = """
import sys, torch
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from transformers import AutoModel


class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_domino":
            raise ModuleNotFoundError(name)


# Without the package: the code comes from the Hub too.
hide = Hide()
sys.meta_path.insert(0, hide)
remote = AutoModel.from_pretrained("someone/tiny-domino", trust_remote_code=True)
assert type(remote).__module__.startswith("transformers_modules."), type(remote)
sys.meta_path.remove(hide)

sys.path.insert(0, sys.argv[1])
from hf_domino import DominoDrafter


def assert_same(ours, theirs):
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values()))


drafter = DominoDrafter.from_pretrained("someone/tiny-domino")
assert_same(drafter, remote)
assert type(AutoModel.from_pretrained("someone/tiny-domino", revision="main")) is DominoDrafter
assert DominoDrafter.from_pretrained("someone/public").config.head == "domino"

drafter.push_to_hub("pushed", target="someone/target")
assert_same(DominoDrafter.from_pretrained("someone/pushed"), drafter)

for name, cause in {
    "private/drafter": RepositoryNotFoundError,
    "someone/nothing": RepositoryNotFoundError,
    "gated/drafter": GatedRepoError,
}.items():
    try:
        DominoDrafter.from_pretrained(name)
    except OSError as error:
        assert isinstance(error.__cause__, cause), (name, error.__cause__)
        assert name in str(error), error
    else:
        raise AssertionError(name)
for name, message in {
    "someone/pickled": "has no model.safetensors, only pytorch_model.bin, a pickle",
    "someone/empty": "someone/empty has no config.json",
}.items():
    try:
        DominoDrafter.from_pretrained(name)
    except (ValueError, OSError) as error:
        assert message in str(error), error
    else:
        raise AssertionError(name)
"""


def test_drafters_come_from_the_hub_and_go_there(tmp_path):
    repos = tmp_path / "hub" / "someone"
    drafter = by_hand()
    drafter.save_pretrained(repos / "tiny-domino")
    write_layout(repos / "public", "Domino")
    drafter.save_pretrained(repos / "pickled")
    (repos / "pickled" / "model.safetensors").rename(repos / "pickled" / "pytorch_model.bin")
    (repos / "empty").mkdir()

    package = str(Path(hf_domino.__file__).parents[1])
    done = run_beside_a_hub(ON_THE_HUB, tmp_path, package)
    assert done.returncode == 0, done.stderr
    code = {file.name for file in (repos / "tiny-domino").glob("*.py")}
    assert {"modeling_domino.py", "configuration_domino.py", "assisted_generation.py"} <= code
    pushed = {file.name for file in (repos / "pushed").iterdir()}
    assert pushed == {"config.json", "model.safetensors", "README.md"} | code
