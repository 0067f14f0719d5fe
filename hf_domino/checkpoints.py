"""Reading drafters from folders and the Hub: ours, and the public Domino, DFlash and speculators layouts as published.

Everything is checked from config.json and the safetensors headers before a tensor is read or memory is asked for.
"""

import copy
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from .configuration_drafter import abridged

logger = logging.getLogger(__name__)

_HUB_KWARGS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")

# Where a field may stand beside the top level.
_SECTIONS = ("dflash_config", "domino_config", "transformer_layer_config")
# Our field -> its public names.
_PUBLIC_NAMES = {
    "sample_from_anchor": ("shift_label", "sample_from_anchor"),
    "num_uncorrected_tokens": ("pure_draft_prefix_len",),
    "causal_state_size": ("gru_hidden_dim",),
    "correction_rank": ("emb_dim", "logits_correction_emb_dim"),
    "is_causal": ("is_causal", "causal"),
} | {
    name: (name,)
    for name in (
        "projector_type block_size mask_token_id target_layer_ids num_target_layers target_hidden_size vocab_size "
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act "
        "max_position_embeddings initializer_range rms_norm_eps rope_parameters rope_scaling rope_theta "
        "attention_bias attention_dropout use_qk_norm layer_types sliding_window pad_token_id bos_token_id eos_token_id"
    ).split()
}
# Parts that some drafters of the family have and this one doesn't.
_UNKNOWN_PARTS = (
    "use_bias_norm use_bias_gate attention_sink_bias use_swa markov_rank use_confidence_head conv_kernel_size "
    "selector_rank"
).split()
# The head's modules stand at the top of the file, or in early and in speculators' files in a container.
_CONTAINERS = {r"^(?:logit_head|domino_head|logits_correction)\.(prefix_gru|embed_proj)\.": r"\1."}
_HEAD_MODULES = ("prefix_gru.", "embed_proj.")
_CONVERT = (
    " To convert it once: tensors = torch.load(file, weights_only=True, map_location='cpu'); "
    "safetensors.torch.save_file({name: t.clone() for name, t in tensors.items()}, 'model.safetensors')."
)
# Copies of the target's tensors that some trainers leave in the file; the drafter always asks the target itself.
TARGET_COPIES = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")
# Tensors, or modules of them, that a file may hold without the drafter having a place for them.
MAY_BE_UNUSED = TARGET_COPIES + _HEAD_MODULES


def fields_from_published(config: dict) -> dict:
    """Fields of a `DominoConfig` from the config.json of a public Domino, DFlash or speculators checkpoint.

    Raises:
        ValueError: it is none of these, a field stands in two places with different values, or it needs a part that
            this package doesn't have.
    """
    if is_eagle3(config):
        raise ValueError("This is an EAGLE-3 drafter, which hf_domino.Eagle3Drafter.from_pretrained loads.")
    speculators = config.get("speculators_model_type")
    if config.get("dflash_config") is None and "target_layer_ids" not in config and speculators is None:
        kind = f"model_type {abridged(config.get('model_type'))}, architectures {abridged(config.get('architectures'))}"
        raise ValueError(
            f"This is not a drafter that hf_domino can read: its config.json ({kind}) has neither dflash_config, nor "
            "target_layer_ids, nor speculators_model_type."
        )
    if speculators not in (None, "dflash", "domino"):
        raise ValueError(
            f"This is a speculators checkpoint of type {abridged(speculators)}; only 'dflash' and 'domino' can be read."
        )
    aux = config.get("aux_hidden_state_layer_ids")
    # speculators counts hidden states, embeddings first: one more than the layer's own number.
    derived = {"aux_hidden_state_layer_ids - 1": one_less(aux)} if isinstance(aux, list) else {}
    found = collect(config, _SECTIONS, _PUBLIC_NAMES, _UNKNOWN_PARTS, derived)
    projector = found.pop("projector_type", "domino" if speculators == "domino" else "dflash")
    if projector not in ("domino", "dflash"):
        raise ValueError(
            f"config.json has projector_type {abridged(projector)}; only 'domino' and 'dflash' can be read."
        )
    vocab_size, draft_vocab_size = found.get("vocab_size"), config.get("draft_vocab_size")
    if draft_vocab_size not in (None, vocab_size):
        raise ValueError(
            "This drafter has a reduced draft vocabulary, which hf_domino does not support: draft_vocab_size is "
            f"{abridged(draft_vocab_size)}, vocab_size is {abridged(vocab_size)}."
        )
    found["head"] = "domino" if projector == "domino" else "none"
    # What each trainer's own code assumes when a field is not written.
    found.setdefault("sample_from_anchor", speculators is not None and projector == "domino")
    found.setdefault("num_uncorrected_tokens", 0 if speculators is None else 1)
    if speculators is not None:
        found.setdefault("block_size", 8)
        if config.get("sliding_window_non_causal"):
            found.setdefault("is_causal", False)
    return found


def is_eagle3(config: dict) -> bool:
    """Whether this is the config.json of an EAGLE-3 drafter, whoever wrote it."""
    if config.get("dflash_config") is not None:
        return False
    names = [config.get(name) for name in ("model_type", "speculators_model_type", "architectures")]
    says_so = "eagle3" in abridged(names).lower()
    # The authors' own files only say LlamaForCausalLM: they are known by their reduced vocabulary and single layer.
    is_like_them = "draft_vocab_size" in config and config.get("num_hidden_layers") == 1
    return says_so or is_like_them or config.get("eagle_config") is not None


def one_less(layer_ids: list) -> list:
    return [i - 1 if isinstance(i, int) else i for i in layer_ids]


def collect(config: dict, sections, public_names: dict, unknown_parts, derived_layer_ids: dict) -> dict:
    """Every field that stands somewhere in a public config.json, under our name.

    Args:
        sections: where a field may stand beside the top level.
        public_names: our field -> its public names.
        unknown_parts: fields that ask for something this package doesn't have.
        derived_layer_ids: place -> the target's layers that it names, in our count.

    Raises:
        ValueError: two places differ, a section is no object, or an unknown part is asked for.
    """
    places = {"": config}
    for name in sections:
        if (section := config.get(name)) is not None:
            if not isinstance(section, dict):
                raise ValueError(f"config.json's {name} must be an object, but is a {type(section).__name__}.")
            places[f"{name}."] = section
    for part in unknown_parts:
        if any(source.get(part) for source in places.values()):
            raise ValueError(f"This drafter has a part that hf_domino does not have: config.json sets {part}.")
    found = {}
    for field, names in public_names.items():
        values = {
            where + name: source[name]
            for where, source in places.items()
            for name in names
            if source.get(name) is not None
        }
        if field == "target_layer_ids":
            values |= derived_layer_ids
        if values:
            found[field] = first = next(iter(values.values()))
            if any(value != first for value in values.values()):
                shown = " and ".join(f"{place} = {abridged(value)}" for place, value in values.items())
                raise ValueError(f"config.json gives one field different values: {shown}.")
    rope = found.get("rope_parameters")
    if isinstance(rope, dict) and isinstance(rope.get("sliding_attention"), dict):
        # One for each kind of layer: speculators reads this one.
        found["rope_parameters"] = rope["sliding_attention"]
    if (dtype := config.get("dtype") or config.get("torch_dtype")) is not None:
        found["dtype"] = dtype
    return found


class Layout(NamedTuple):
    """How the files of one kind of drafter look. Tensors are told by how their names begin.

    Args:
        fields: maps the config.json of a public checkpoint to fields of the kind's configuration.
        renames: pattern -> replacement, for tensors that have other names in some files.
        optional: tensors that are there as a whole or not at all.
        may_be_unused: tensors that a file may hold without the drafter having a place for them.
        types: name -> type, of the tensors that don't hold floating point numbers.
        refused: name -> why a file that has this tensor can't be read.
    """

    fields: Callable
    renames: dict
    optional: tuple = ()
    may_be_unused: tuple = ()
    types: dict = {}
    refused: dict = {}


LAYOUT = Layout(
    fields_from_published,
    _CONTAINERS,
    optional=_HEAD_MODULES,
    may_be_unused=MAY_BE_UNUSED,
    types={"draft_vocabulary": "I64"},
    refused=dict.fromkeys(("d2t", "t2d"), "maps a reduced draft vocabulary, which hf_domino does not support here"),
)


def load_drafter(cls, load, name_or_path, config, model_args, kwargs):
    """What `Drafter.from_pretrained` does around `PreTrainedModel.from_pretrained` (`load`)."""
    if kwargs.get("state_dict") is not None or name_or_path is None:
        return load(name_or_path, *model_args, config=config, **kwargs)
    if kwargs.pop("use_safetensors", None) is False:
        raise ValueError("hf_domino reads drafters from safetensors only; use_safetensors=False is not supported.")
    hub_kwargs = {name: kwargs[name] for name in _HUB_KWARGS if kwargs.get(name) is not None}
    if not isinstance(config, cls.config_class):
        is_config = isinstance(config, PreTrainedConfig)
        fields = config.to_dict() if is_config else _read_json(config or name_or_path, CONFIG_NAME, hub_kwargs)
        if fields.get("model_type") != cls.config_class.model_type:
            fields = cls.layout.fields(fields)
        overrides = {name: kwargs.pop(name) for name in cls.config_class.own_fields() & kwargs.keys()}
        config = cls.config_class.from_dict(fields, **overrides)
    missing = _check_weights(cls, config, name_or_path, kwargs.get("variant"), hub_kwargs)
    if missing:
        logger.warning(
            f"{name_or_path} has no Domino head ({', '.join(missing)}): a warm start from a DFlash drafter. The new "
            "head starts as the identity."
        )
    loaded = load(
        name_or_path, *model_args, config=config, use_safetensors=True, key_mapping=dict(cls.layout.renames), **kwargs
    )
    drafter = loaded[0] if isinstance(loaded, tuple) else loaded
    if drafter.draft_vocabulary is not None:
        check_draft_vocabulary(drafter.draft_vocabulary, config.vocab_size)
    return loaded


def check_draft_vocabulary(token_ids, vocab_size) -> None:
    """Raise a `ValueError` unless these are at least two distinct token ids, [D]."""
    if len(token_ids) < 2 or len(token_ids.unique()) != len(token_ids):
        raise ValueError(f"A draft vocabulary must be at least two distinct token ids, but has {len(token_ids)} ids.")
    if not 0 <= token_ids.min() <= token_ids.max() < vocab_size:
        raise ValueError(
            f"A draft vocabulary must hold token ids from 0 to {vocab_size - 1}, but has ids from {token_ids.min()} to "
            f"{token_ids.max()}."
        )


def _check_weights(cls, config, name_or_path, variant, hub_kwargs) -> list[str]:
    """Compare the safetensors headers with what the configuration asks for; return what is missing of the optional."""
    layout = cls.layout
    with torch.device("meta"):
        expected = {name: list(tensor.shape) for name, tensor in cls(copy.deepcopy(config)).state_dict().items()}
    optional = {name for name in expected if name.startswith(layout.optional)}
    ignored = tuple(name for name in layout.may_be_unused if not optional or name not in layout.optional)
    found, problems = set(), []
    for name, shape, dtype in _read_headers(name_or_path, variant, hub_kwargs):
        for pattern, own in layout.renames.items():
            name = re.sub(pattern, own, name)
        if name in found:
            problems.append(f"{name} is there twice")
        found.add(name)
        if name in layout.refused:
            problems.append(f"{name} {layout.refused[name]}")
        elif name not in expected:
            problems += [] if name.startswith(ignored) else [f"{name} is no tensor of this drafter"]
        elif shape != expected[name]:
            problems.append(f"{name} has shape {shape} instead of {expected[name]}")
        elif name in layout.types and dtype != layout.types[name]:
            problems.append(f"{name} holds {dtype} instead of {layout.types[name]}")
        elif name not in layout.types and not re.fullmatch(r"B?F\d+", dtype):
            problems.append(f"{name} holds {dtype} instead of floating point numbers")
    missing = [name for name in expected if name not in found]
    may_miss = set() if optional & found else optional
    problems += [f"{name} is missing" for name in missing if name not in may_miss]
    if problems:
        shown = "; ".join(problems[:6]) + (f"; and {len(problems) - 6} more" if len(problems) > 6 else "")
        raise ValueError(f"The weights of {name_or_path} don't fit its configuration: {shown}.")
    return missing


def _read_headers(name_or_path, variant, hub_kwargs):
    """Name, shape and type of every tensor, from the headers of the safetensors files alone."""
    for file in _weight_files(name_or_path, variant, hub_kwargs):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in list(tensors.keys()):
                    tensor = tensors.get_slice(name)
                    yield name, tensor.get_shape(), tensor.get_dtype()
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{Path(file).name} of {name_or_path} is not a readable safetensors file: {error}"
            ) from error


def _weight_files(name_or_path, variant, hub_kwargs) -> list[str]:
    def locate(filename):
        return cached_file(name_or_path, filename, _raise_exceptions_for_missing_entries=False, **hub_kwargs)

    weights, index_name = SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME
    if variant is not None:
        weights, index_name = (f".{variant}.".join(name.rsplit(".", 1)) for name in (weights, index_name))
    if (file := locate(weights)) is not None:
        return [file]
    if locate(index_name) is not None:
        index = _read_json(name_or_path, index_name, hub_kwargs)
        shards = index.get("weight_map")
        if not isinstance(shards, dict) or not isinstance(index.get("metadata"), dict):
            raise ValueError(f"{index_name} of {name_or_path} has no weight_map or no metadata.")
        for shard in shards.values():
            if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
                raise ValueError(f"{index_name} of {name_or_path} names {abridged(shard)}, not a safetensors file.")
        return [cached_file(name_or_path, shard, **hub_kwargs) for shard in sorted(set(shards.values()))]
    pickles = [name for name in ("pytorch_model.bin", "pytorch_model.bin.index.json") if locate(name) is not None]
    raise ValueError(
        f"{name_or_path} has no {weights}"
        + (f", only {pickles[0]}, a pickle that could run code when read. " if pickles else ". ")
        + "hf_domino reads drafters from safetensors only."
        + (_CONVERT if pickles else "")
    )


def _read_json(name_or_path, filename, hub_kwargs) -> dict:
    file = cached_file(name_or_path, filename, **hub_kwargs)
    if file is None:
        raise OSError(f"{name_or_path} has no {filename}.")
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{filename} of {name_or_path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{filename} of {name_or_path} must hold an object, but holds a {type(content).__name__}.")
    return content
