"""EAGLE-3 checkpoints of every public layout load as published; others are refused by name, before a tensor is read."""

import json
import pickle
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel

from hf_domino import DominoDrafter, Eagle3Config, Eagle3Drafter

from . import test_checkpoints
from .test_checkpoints import Bomb, assert_same_tensors, drop, put, write
from .tiny import VOCAB, assert_same_as_plain, inputs, tiny_drafter, tiny_target

D = 23
# The authors' file: a Llama with a draft vocabulary and one layer, nothing else.
AUTHORS = dict(
    architectures=["LlamaForCausalLM"],
    bos_token_id=1,
    eos_token_id=2,
    hidden_act="silu",
    hidden_size=32,
    initializer_range=0.02,
    intermediate_size=64,
    max_position_embeddings=512,
    model_type="llama",
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=1,
    pad_token_id=0,
    rms_norm_eps=1e-05,
    tie_word_embeddings=False,
    torch_dtype="float32",
    transformers_version="4.28.1",
    use_cache=True,
    vocab_size=VOCAB,
    draft_vocab_size=D,
    rope_scaling=None,
)
SPECFORGE = {
    **AUTHORS,
    "architectures": ["LlamaForCausalLMEagle3"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 8,
    "max_window_layers": 36,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}
# vLLM's speculators: the layer under transformer_layer_config, layer ids one higher, the layer called layers.0.
SPECULATORS = dict(
    architectures=["Eagle3Speculator"],
    draft_vocab_size=D,
    dtype="float32",
    eagle_aux_hidden_state_layer_ids=[2, 4, 5],
    embed_requires_grad=False,
    norm_before_fc=False,
    norm_before_residual=True,
    speculators_config={"algorithm": "eagle3", "verifier": {"name_or_path": "someone/target"}},
    speculators_model_type="eagle3",
    speculators_version="0.3.0",
    target_hidden_size=None,
    tie_word_embeddings=False,
    transformer_layer_config=dict(
        attention_bias=False,
        attention_dropout=0.0,
        head_dim=8,
        hidden_act="silu",
        hidden_size=32,
        initializer_range=0.02,
        intermediate_size=64,
        max_position_embeddings=512,
        mlp_bias=False,
        model_type="llama",
        num_attention_heads=4,
        num_hidden_layers=1,
        num_key_value_heads=2,
        rms_norm_eps=1e-05,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000},
        vocab_size=VOCAB,
    ),
)
FIELDS = dict(
    vocab_size=VOCAB,
    draft_vocabulary_size=D,
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 1000000},
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
EMBEDDINGS = {"embed_tokens.weight": torch.zeros(VOCAB, 32)}
VERIFIER = {**EMBEDDINGS, "verifier_lm_head.weight": torch.zeros(D, 32), "verifier_norm.weight": torch.zeros(32)}
NO_MAP = {"d2t": torch.zeros(VOCAB, dtype=torch.long), "t2d": torch.zeros(VOCAB, dtype=torch.bool)}
TEN_THOUSAND = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
OF_SPECULATORS = dict.fromkeys(["bos_token_id", "eos_token_id", "pad_token_id"]) | dict(norm_before_residual=True)
LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128)

# name -> config.json, the fields in which it differs from FIELDS, tensors beside the drafter's, name of the layer
LAYOUTS = {
    "authors": (AUTHORS, TEN_THOUSAND, EMBEDDINGS, "midlayer."),
    "authors, every token": (
        {**AUTHORS, "draft_vocab_size": VOCAB},
        dict(**TEN_THOUSAND, draft_vocabulary_size=None),
        {**EMBEDDINGS, **NO_MAP},
        "midlayer.",
    ),
    "authors, scaled rope": (
        {**AUTHORS, "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}},
        {},
        "midlayer.",
    ),
    "authors, another width than the target's layers": (
        {**AUTHORS, "target_hidden_size": 48},
        dict(**TEN_THOUSAND, target_hidden_size=48),
        {},
        "midlayer.",
    ),
    "SpecForge": (SPECFORGE, {}, {}, "midlayer."),
    "SpecForge and SGLang with layer ids": (
        {**SPECFORGE, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}},
        dict(target_layer_ids=[1, 3, 4]),
        {},
        "midlayer.",
    ),
    "NVIDIA, with the usual layers": (
        {**SPECFORGE, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [], "use_aux_hidden_state": True}},
        {},
        {},
        "midlayer.",
    ),
    "SpecForge for an image-text model": (
        {
            **SPECFORGE,
            "target_model_type": "qwen3_vl",
            "rope_scaling": {"mrope_section": [1, 2, 1], "rope_type": "mrope"},
        },
        {},
        {},
        "midlayer.",
    ),
    "AngelSlim": (
        {**SPECFORGE, "aux_hidden_states_layer_ids": [1, 3, 4]},
        dict(target_layer_ids=[1, 3, 4]),
        {},
        "midlayer.",
    ),
    "AngelSlim for vLLM": (
        {
            **SPECFORGE,
            "aux_hidden_states_layer_ids": [1, 3, 4],
            "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        },
        dict(target_layer_ids=[1, 3, 4]),
        EMBEDDINGS,
        "midlayer.",
    ),
    "speculators": (
        SPECULATORS,
        dict(**OF_SPECULATORS, target_layer_ids=[1, 3, 4]),
        VERIFIER,
        "layers.0.",
    ),
    "speculators, norms of queries and keys": (
        {
            **SPECULATORS,
            "eagle_aux_hidden_state_layer_ids": None,
            "norm_before_residual": False,
            "transformer_layer_config": {**SPECULATORS["transformer_layer_config"], "model_type": "qwen3"},
        },
        dict(**{**OF_SPECULATORS, "norm_before_residual": False}, use_qk_norm=True),
        EMBEDDINGS,
        "layers.0.",
    ),
}


def by_hand(**fields):
    """A drafter built from fields, with weights that are nowhere zero and every fourth token in its vocabulary."""
    drafter = test_checkpoints.by_hand(Eagle3Drafter, FIELDS, **fields)
    if drafter.d2t is not None:
        drafter.d2t.copy_(3 * torch.arange(D) + 2)
        drafter.t2d.zero_()[4 * torch.arange(D) + 2] = True
    return drafter


def write_layout(folder, name):
    """Write a tiny checkpoint of a public layout; returns the drafter that it must load as."""
    config, fields, more, layer = LAYOUTS[name]
    drafter = by_hand(**fields)
    tensors = {re.sub(r"^midlayer\.", layer, name): tensor for name, tensor in drafter.state_dict().items()}
    write(folder, config, {**tensors, **more})
    return drafter


@torch.no_grad()
def assert_same_drafter(loaded, expected):
    assert_same_tensors(loaded, expected)
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(1, 9, expected.fc.in_features, generator=generator)
    embeddings = torch.randn(1, 9, 32, generator=generator)
    # Not to the bit: tensors of a file stand at other addresses, where other kernels may be taken.
    ours, theirs = (each.draft_logits(each(embeddings, each.project(features))) for each in (loaded, expected))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", LAYOUTS)
def test_public_checkpoint_loads_as_published(tmp_path, name):
    expected = write_layout(tmp_path / "public", name)
    loaded, info = Eagle3Drafter.from_pretrained(tmp_path / "public", output_loading_info=True)
    assert not any(info.values())
    assert_same_drafter(loaded, expected)
    if expected.draft_vocabulary is not None:
        assert loaded.draft_vocabulary.tolist() == list(range(2, 4 * D, 4))

    loaded.save_pretrained(tmp_path / "own")
    assert json.loads((tmp_path / "own" / "config.json").read_text())["model_type"] == "eagle3"
    tensors = load_file(tmp_path / "own" / "model.safetensors")
    parts = {name.split(".")[0] for name in tensors}
    assert parts - {"d2t", "t2d"} == {"fc", "midlayer", "norm", "lm_head"}
    assert ({"d2t", "t2d"} <= parts) == (expected.d2t is not None)
    assert type(AutoConfig.from_pretrained(tmp_path / "own")) is Eagle3Config
    assert_same_drafter(AutoModel.from_pretrained(tmp_path / "own"), expected)


@pytest.mark.parametrize("name", ["authors", "SpecForge and SGLang with layer ids", "AngelSlim", "speculators"])
def test_public_checkpoint_drafts(tmp_path, name):
    write_layout(tmp_path, name)
    drafter = Eagle3Drafter.from_pretrained(tmp_path)
    acceptance = assert_same_as_plain(tiny_target(num_hidden_layers=8), drafter, rate=1.0, **inputs())
    assert acceptance.mean > 5


def test_saved_in_another_dtype_the_maps_stay_what_they_are(tmp_path):
    drafter = by_hand().to(torch.bfloat16)
    drafter.save_pretrained(tmp_path)
    for kwargs in ({}, {"dtype": torch.float32}):
        loaded = AutoModel.from_pretrained(tmp_path, **kwargs)
        assert loaded.dtype == kwargs.get("dtype", torch.bfloat16)
        assert loaded.d2t.dtype == torch.long and loaded.t2d.dtype == torch.bool
        assert torch.equal(loaded.draft_vocabulary, drafter.draft_vocabulary)


def test_fields_may_be_given_at_loading(tmp_path):
    write_layout(tmp_path, "SpecForge")
    drafter = Eagle3Drafter.from_pretrained(tmp_path, target_layer_ids=[5, 1, 2], num_draft_tokens=3)
    assert drafter.config.target_layer_ids == [5, 1, 2] and drafter.config.num_draft_tokens == 3


REFUSED = {
    "a Llama": ({"draft_vocab_size": ...}, r"not an EAGLE-3 drafter .*model_type 'llama', architectures \['LlamaFor"),
    "DFlash": ({"dflash_config": {"mask_token_id": 1}}, "not an EAGLE-3 drafter"),
    "P-EAGLE": ({"speculators_model_type": "peagle"}, "speculators checkpoint of type 'peagle', not 'eagle3'"),
    "EAGLE-3.1": ({"fc_norm": True, "norm_output": True}, "config.json sets fc_norm"),
    "a norm before fc": ({"norm_before_fc": True}, "config.json sets norm_before_fc"),
    "embeddings of its own": ({"embed_requires_grad": True}, "config.json sets embed_requires_grad"),
    "two layers": ({"num_hidden_layers": 2, "eagle_config": {}}, "more than one layer"),
    "last hidden state only": ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
    "layers in two ways": (
        {
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
            "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        },
        r"eagle_config.* = \[1, 3, 4\] and eagle_aux_hidden_state_layer_ids - 1 = \[0, 2, 3\]",
    ),
    "the embeddings as a feature": (
        {"eagle_aux_hidden_state_layer_ids": [0, 4]},
        r"target_layer_ids must be .*\[-1, 3\]",
    ),
    "layer ids of no kind": ({"aux_hidden_states_layer_ids": ["a"]}, "target_layer_ids must be a list"),
    "a list for a section": ({"eagle_config": [1]}, "config.json's eagle_config must be an object, but is a list"),
    "no vocabulary": ({"vocab_size": None}, r"Eagle3Config\.vocab_size must be an integer"),
    "a larger draft vocabulary": (
        {"draft_vocab_size": VOCAB + 1},
        rf"Eagle3Config\.draft_vocabulary_size must be an integer from 2 to {VOCAB}",
    ),
    "absurd sizes": ({"hidden_size": 10**9}, r"Eagle3Config\.hidden_size must be an integer"),
    "a dynamic rope": (
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "rope_parameters must be of a rope_type",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_drafter_of_this_kind_is_refused(tmp_path, case):
    changes, message = REFUSED[case]
    config = {name: value for name, value in {**SPECFORGE, **changes}.items() if value is not ...}
    if case == "a Llama":
        config["architectures"] = AUTHORS["architectures"]
    write(tmp_path, config, by_hand().state_dict())
    with pytest.raises(ValueError, match=message) as error:
        Eagle3Drafter.from_pretrained(tmp_path)
    assert len(str(error.value)) < 500


def test_each_kind_names_the_other(tmp_path):
    by_hand().save_pretrained(tmp_path / "eagle3")
    with pytest.raises(ValueError, match=r"EAGLE-3 drafter, which hf_domino\.Eagle3Drafter\.from_pretrained loads"):
        DominoDrafter.from_pretrained(tmp_path / "eagle3")
    tiny_drafter(tiny_target()).save_pretrained(tmp_path / "domino")
    with pytest.raises(ValueError, match="not an EAGLE-3 drafter .*model_type 'domino'"):
        Eagle3Drafter.from_pretrained(tmp_path / "domino")


DAMAGED = {
    "a missing tensor": (drop("fc.weight"), r"fc\.weight is missing\."),
    "no map": (drop("d2t"), r"d2t is missing\."),
    "no head": (drop("lm_head.weight"), r"lm_head\.weight is missing\."),
    "another head": (put("lm_head.weight", VOCAB, 32), r"lm_head\.weight has shape \[97, 32\] instead of \[23, 32\]\."),
    "two features": (put("fc.weight", 32, 64), r"fc\.weight has shape \[32, 64\] instead of \[32, 96\]\."),
    "a map of other numbers": (put("d2t", D, dtype=torch.int32), r"d2t holds I32 instead of I64\."),
    "a part that is unknown": (put("fc_norm.0.weight", 32), r"fc_norm\.0\.weight is no tensor of this drafter\."),
    "tokens that are not there": (
        lambda tensors: tensors.update(d2t=torch.full((D,), VOCAB)),
        "token ids from 0 to 96, but has ids from 97 to 119",
    ),
    "tokens twice": (lambda tensors: tensors.update(d2t=-torch.arange(D)), "distinct token ids"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_weights_that_do_not_fit_are_refused(tmp_path, case):
    damage, message = DAMAGED[case]
    tensors = dict(by_hand().state_dict())
    write(tmp_path, SPECFORGE, tensors)
    Eagle3Drafter.from_pretrained(tmp_path)
    damage(tensors)
    write(tmp_path, SPECFORGE, tensors)
    with pytest.raises(ValueError, match=message):
        Eagle3Drafter.from_pretrained(tmp_path)


def test_a_pickle_is_not_read_and_the_way_to_convert_it_works(tmp_path, monkeypatch):
    expected = write_layout(tmp_path, "authors")
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "marker")))
    with pytest.raises(ValueError, match="only pytorch_model.bin, a pickle that could run code when read") as error:
        Eagle3Drafter.from_pretrained(tmp_path)
    assert not (tmp_path / "marker").exists()

    torch.save(tensors, tmp_path / "pytorch_model.bin")
    code = str(error.value).partition("convert it once: ")[2].removesuffix(".")
    monkeypatch.chdir(tmp_path)
    import safetensors.torch

    exec(code, {"torch": torch, "safetensors": safetensors, "file": "pytorch_model.bin"})
    assert_same_drafter(Eagle3Drafter.from_pretrained(tmp_path), expected)
