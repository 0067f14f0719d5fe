"""Reading drafters from folders and the Hub: ours, and the public Domino, DFlash and speculators layouts as published.

Everything is checked from config.json and the safetensors headers before a tensor is read or memory is asked for.
"""

import logging
import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

logger = logging.getLogger(__name__)

_HUB_KWARGS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")

# our field -> its public names. A public field may stand at the top level or under `dflash_config`.
_PUBLIC_NAMES = {
    "block_size": ("block_size",),
    "mask_token_id": ("mask_token_id",),
    "target_layer_ids": ("target_layer_ids",),
    "num_target_layers": ("num_target_layers",),
    "target_hidden_size": ("target_hidden_size",),
    "sample_from_anchor": ("shift_label", "sample_from_anchor"),
    "num_uncorrected_tokens": ("pure_draft_prefix_len",),
    "causal_state_size": ("gru_hidden_dim",),
    "correction_rank": ("emb_dim",),
    "is_causal": ("is_causal",),
    "projector_type": ("projector_type",),
}
_BACKBONE_FIELDS = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "hidden_act max_position_embeddings initializer_range rms_norm_eps rope_parameters rope_scaling rope_theta "
    "attention_bias attention_dropout use_qk_norm layer_types sliding_window pad_token_id bos_token_id eos_token_id "
    "dtype torch_dtype"
).split()
# Head modules that switch on parts of which no public checkpoint or description exists.
_UNKNOWN_SWITCHES = ("use_bias_norm", "use_bias_gate")
_EARLY_NAMES = {r"^logit_head\.(prefix_gru|embed_proj)\.": r"\1."}
# Copies of the target's tensors that some trainers leave in the file; the drafter always asks the target itself.
_TARGET_COPIES = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")
_HEAD_MODULES = ("prefix_gru.", "embed_proj.")


def fields_from_published(config: dict) -> dict:
    """Fields of a `DominoConfig` from the config.json of a public Domino, DFlash or speculators checkpoint.

    Raises:
        ValueError: it is none of these, a field stands in two places with different values, or it needs a part that
            this package doesn't have.
    """
    nested = config.get("dflash_config") or {}
    speculators = "speculators_model_type" in config
    if not isinstance(nested, dict) or not (nested or speculators or "target_layer_ids" in config):
        raise ValueError(
            "This is not a drafter that hf_domino can read: its config.json has "
            f"model_type {config.get('model_type')!r} and architectures {config.get('architectures')!r}, but neither "
            "`dflash_config`, nor `target_layer_ids`, nor `speculators_model_type`."
        )
    if speculators and config["speculators_model_type"] != "dflash":
        raise ValueError(
            f"This speculators checkpoint is of type {config['speculators_model_type']!r}; only 'dflash', with or "
            "without the Domino projector, can be read."
        )
    found = {}
    for field, names in _PUBLIC_NAMES.items():
        places = {
            f"{where}{name}": source[name]
            for where, source in (("", config), ("dflash_config.", nested))
            for name in names
            if source.get(name) is not None
        }
        if len({repr(value) for value in places.values()}) > 1:
            raise ValueError(
                "config.json gives one field two values: " + " and ".join(f"{k}={v}" for k, v in places.items())
            )
        if places:
            found[field] = next(iter(places.values()))

    for switch in _UNKNOWN_SWITCHES:
        if config.get(switch) or nested.get(switch):
            raise ValueError(f"config.json sets {switch}, a variant of the Domino head that hf_domino does not have.")
    projector = found.pop("projector_type", "dflash")
    if projector not in ("domino", "dflash"):
        raise ValueError(f"config.json has projector_type {projector!r}; only 'domino' and 'dflash' can be read.")
    found["head"] = "domino" if projector == "domino" else "none"
    # What each trainer's own code assumes when the field is not written.
    found.setdefault("sample_from_anchor", speculators and projector == "domino")
    found.setdefault("num_uncorrected_tokens", 1 if speculators else 0)

    backbone = config.get("transformer_layer_config", {}) if speculators else config
    found |= {name: backbone[name] for name in _BACKBONE_FIELDS if backbone.get(name) is not None}
    if speculators:
        # Their ids count hidden states, embeddings first: one more than the layer's own number.
        if (ids := config.get("aux_hidden_state_layer_ids")) is not None:
            found["target_layer_ids"] = [i - 1 for i in ids]
        found.setdefault("block_size", 8)
        if config.get("sliding_window_non_causal"):
            found["is_causal"] = False
    draft_vocab_size = config.get("draft_vocab_size")
    if draft_vocab_size not in (None, found.get("vocab_size")):
        raise ValueError(
            f"This drafter has a reduced draft vocabulary (draft_vocab_size {draft_vocab_size}, vocab_size "
            f"{found.get('vocab_size')}), which hf_domino does not support."
        )
    return found


def load_drafter(cls, load, name_or_path, config, model_args, kwargs):
    """What `DominoDrafter.from_pretrained` does around `PreTrainedModel.from_pretrained` (`load`)."""
    if kwargs.get("state_dict") is not None or name_or_path is None:
        return load(name_or_path, *model_args, config=config, **kwargs)
    if kwargs.setdefault("use_safetensors", True) is False:
        raise ValueError("hf_domino reads drafters from safetensors only; use_safetensors=False is not supported.")
    hub_kwargs = {name: kwargs[name] for name in _HUB_KWARGS if kwargs.get(name) is not None}
    if not isinstance(config, PreTrainedConfig):
        fields, _ = PreTrainedConfig.get_config_dict(config or name_or_path, **hub_kwargs)
        if fields.get("model_type") != cls.config_class.model_type:
            fields = fields_from_published(fields)
        own = cls.config_class.__dataclass_fields__
        overrides = {name: kwargs.pop(name) for name in list(kwargs) if name in own and name != "dtype"}
        config = cls.config_class.from_dict({**fields, **overrides})
    missing = _check_weights(cls, config, name_or_path, hub_kwargs)
    if missing:
        logger.warning(
            f"{name_or_path} has no Domino head ({', '.join(missing)}): a warm start from a DFlash drafter. The new "
            "head starts as the identity."
        )
    return load(name_or_path, *model_args, config=config, key_mapping=_EARLY_NAMES, **kwargs)


def _check_weights(cls, config, name_or_path, hub_kwargs) -> list[str]:
    """Compare the safetensors headers with what the configuration asks for; return the missing head tensors."""
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in cls(config).state_dict().items()}
    found = {}
    for file in _weight_files(name_or_path, hub_kwargs):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in list(tensors.keys()):
                    shape = tuple(tensors.get_slice(name).get_shape())
                    for early, now in _EARLY_NAMES.items():
                        name = re.sub(early, now, name)
                    found[name] = shape
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{Path(file).name} of {name_or_path} is not a readable safetensors file: {error}"
            ) from error
    wrong = [f"{n} is {found[n]} but must be {expected[n]}" for n in expected if n in found and found[n] != expected[n]]
    missing = [name for name in expected if name not in found]
    surplus = [n for n in found if n not in expected and n not in _TARGET_COPIES and not n.startswith(_HEAD_MODULES)]
    lost = [name for name in missing if not name.startswith(_HEAD_MODULES)]
    # A head is there as a whole or not at all.
    if len(missing) - len(lost) not in (0, sum(name.startswith(_HEAD_MODULES) for name in expected)):
        lost = missing
    problems = (
        [f"{name} is missing" for name in lost] + wrong + [f"{name} is no tensor of this drafter" for name in surplus]
    )
    if problems:
        shown = "; ".join(problems[:6]) + (f"; and {len(problems) - 6} more" if len(problems) > 6 else "")
        raise ValueError(f"The weights of {name_or_path} don't fit its configuration: {shown}.")
    return missing


def _weight_files(name_or_path, hub_kwargs) -> list[str]:
    def locate(filename):
        return cached_file(name_or_path, filename, _raise_exceptions_for_missing_entries=False, **hub_kwargs)

    if (file := locate(SAFE_WEIGHTS_NAME)) is not None:
        return [file]
    if (index := locate(SAFE_WEIGHTS_INDEX_NAME)) is not None:
        return get_checkpoint_shard_files(name_or_path, index, **hub_kwargs)[0]
    pickles = [name for name in ("pytorch_model.bin", "pytorch_model.bin.index.json") if locate(name) is not None]
    raise ValueError(
        f"{name_or_path} has no {SAFE_WEIGHTS_NAME}"
        + (f", only {pickles[0]}, a pickle that could run code when read. " if pickles else ". ")
        + "hf_domino reads drafters from safetensors only."
    )
