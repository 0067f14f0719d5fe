"""DrafterConfig: what every kind of drafter must know about itself and its target, checked when it is built."""

import reprlib

import torch
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

MAX_TARGET_LAYERS = 4096
LAYER_TYPES = ("full_attention", "sliding_attention")
# rope_type -> the parameters it can't do without. Types whose frequencies change with the length seen are left out:
# keys of the context stay as they were written.
_ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_ROPE_NUMBERS = dict.fromkeys(
    "rope_theta factor low_freq_factor high_freq_factor original_max_position_embeddings attention_factor beta_fast "
    "beta_slow".split(),
    (1e-9, 1e12),
) | dict.fromkeys(["mscale", "mscale_all_dim"], (0, 1e12))
# What is read from a config.json beside a configuration's own fields. Other keys stay where they are: some of them
# would make transformers read other files, or take memory, without a check.
_FILE_KEYS = {"auto_map", "dtype", "torch_dtype", "rope_scaling", "rope_theta"}
_SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


class DrafterConfig(PreTrainedConfig):
    """The fields that all drafters have, and their checks. Each kind of drafter documents them in its own class.

    A kind adds its integers, numbers and choices to the tables below, and further checks in `_check_own_fields`.
    """

    # field -> smallest and largest value that makes sense. The upper ends are far above any published drafter; they
    # stop a damaged or hostile config.json before memory is asked for.
    _integers = {
        "vocab_size": (2, 2**24),
        "hidden_size": (1, 2**16),
        "target_hidden_size": (1, 2**16),
        "intermediate_size": (1, 2**20),
        "num_attention_heads": (1, 1024),
        "num_key_value_heads": (1, 1024),
        "head_dim": (2, 4096),
        "max_position_embeddings": (1, 2**30),
    }
    _numbers = {"rms_norm_eps": (0, 1), "initializer_range": (0, 100), "attention_dropout": (0, 1)}
    _choices = {
        "hidden_act": tuple(ACT2FN),
        "use_qk_norm": (True, False),
        "attention_bias": (True, False),
    }
    # Sizes that may be left out, and are at most `vocab_size`.
    _parts_of_vocabulary = ("draft_vocabulary_size",)

    vocab_size: int | None = None
    target_layer_ids: list[int] | None = None
    target_hidden_size: int | None = None
    num_target_layers: int | None = None
    draft_vocabulary_size: int | None = None

    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 40960
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    rope_parameters: dict | None = None
    attention_bias: bool = False
    attention_dropout: float | int = 0.0
    use_qk_norm: bool = True

    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs):
        self._check_dtype(self.dtype if self.dtype is not None else kwargs.get("torch_dtype"))
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None and is_int(self.hidden_size) and is_int(self.num_attention_heads, 1):
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        self._check_values()
        self._check_optional_sizes()
        self._check_heads()
        self._check_depth()
        self._check_own_fields()
        self._check_rope_layout(self.rope_parameters, kwargs.get("rope_scaling"))
        super().__post_init__(**kwargs)
        self._check_rope_values()

    def _check_own_fields(self):
        """What a kind of drafter checks and completes beyond the tables."""

    def _check_dtype(self, dtype):
        if isinstance(dtype, str):
            dtype = getattr(torch, dtype, dtype)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            self._refuse("dtype", "a floating point type", dtype)

    def _check_values(self):
        for field, (low, high) in self._integers.items():
            if not is_int(getattr(self, field), low, high):
                self._refuse(field, f"an integer from {low} to {high}", getattr(self, field))
        for field, (low, high) in self._numbers.items():
            if not _is_number(value := getattr(self, field)) or not low <= value <= high:
                self._refuse(field, f"a number from {low} to {high}", value)
        for field, choices in self._choices.items():
            value = getattr(self, field)
            if not any(type(value) is type(choice) and value == choice for choice in choices):
                self._refuse(field, f"one of {', '.join(map(str, choices))}", value)

    def _check_optional_sizes(self):
        for field in self._parts_of_vocabulary:
            value = getattr(self, field)
            if value is not None and not is_int(value, 2, self.vocab_size):
                self._refuse(field, f"an integer from 2 to {self.vocab_size} (vocab_size)", value)

    def _check_heads(self):
        if self.num_attention_heads % self.num_key_value_heads:
            self._refuse(
                "num_key_value_heads",
                f"a divisor of num_attention_heads ({self.num_attention_heads})",
                self.num_key_value_heads,
            )
        if self.head_dim % 2:
            self._refuse("head_dim", "even, for rotary positions", self.head_dim)

    def _check_depth(self):
        depth = self.num_target_layers
        if depth is not None and not is_int(depth, 1, MAX_TARGET_LAYERS):
            self._refuse("num_target_layers", f"an integer from 1 to {MAX_TARGET_LAYERS}", depth)

    def _check_target_layers(self, ids):
        """Set `target_layer_ids` to `ids`, a list of distinct layers."""
        last = (self.num_target_layers or MAX_TARGET_LAYERS) - 1
        is_list = isinstance(ids, list | tuple) and 0 < len(ids) <= last + 1
        if not is_list or not all(is_int(i, 0, last) for i in ids) or len(set(ids)) != len(ids):
            self._refuse("target_layer_ids", f"a list of distinct layer ids from 0 to {last}", ids)
        self.target_layer_ids = list(ids)

    def _check_rope_layout(self, *values):
        for value in values:
            if value is not None and (not isinstance(value, dict) or any(name in value for name in LAYER_TYPES)):
                self._refuse("rope_parameters", "one object for all layers", value)

    def _check_rope_values(self):
        rope = self.rope_parameters
        rope_type = rope.get("rope_type")
        if rope_type not in tuple(_ROPE_TYPES):
            self._refuse("rope_parameters", f"of a rope_type out of {', '.join(_ROPE_TYPES)}", rope)
        for name, (low, high) in _ROPE_NUMBERS.items():
            value = rope.get(name)
            is_needed = name == "rope_theta" or name in _ROPE_TYPES[rope_type]
            if (value is not None or is_needed) and not (_is_number(value) and low <= value <= high):
                self._refuse("rope_parameters", f"with a number from {low} to {high} for {name}", rope)

    def _refuse(self, field, requirement, value):
        raise ValueError(f"{type(self).__name__}.{field} must be {requirement}, but is {abridged(value)}.")

    def feature_layers(self, num_target_layers: int) -> list[int]:
        """The target layers, from 0, whose outputs are the features of a target with so many layers, in their order."""
        return self.target_layer_ids

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """As in transformers, with fields given as keyword arguments checked like those of `config_dict`."""
        fields = cls.own_fields()
        config_dict = {name: value for name, value in config_dict.items() if name in fields | _FILE_KEYS}
        overrides = {name: kwargs.pop(name) for name in fields & kwargs.keys()}
        return super().from_dict({**config_dict, **overrides}, **kwargs)

    @classmethod
    def own_fields(cls) -> set[str]:
        """Names of the fields that a drafter's configuration has beside those of every transformers configuration."""
        return cls.__dataclass_fields__.keys() - PreTrainedConfig.__dataclass_fields__.keys()


def fields_for_target(target_config: PreTrainedConfig) -> dict:
    """The fields of a [`DrafterConfig`] that fit a decoder target, text configs of image-text models included.

    Raises:
        ValueError: the target is an encoder-decoder model or has no usable size.
    """
    if target_config.is_encoder_decoder:
        raise ValueError(
            f"A drafter needs a decoder-only target, but {target_config.model_type!r} is an encoder-decoder."
        )
    text = target_config.get_text_config(decoder=True)
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    if missing := [name for name in sizes if _size(text, name) is None]:
        raise ValueError(
            f"The configuration of {target_config.model_type!r} has no usable {', '.join(missing)}, which a drafter is "
            "sized by."
        )
    width = _size(text, "word_embed_proj_dim") or text.hidden_size
    heads = text.num_attention_heads
    head_dim = _size(text, "head_dim") or width // heads
    rope = getattr(text, "rope_parameters", None) or {}
    rope = rope.get("full_attention") or rope
    return {
        "vocab_size": text.vocab_size,
        "target_hidden_size": text.hidden_size,
        "num_target_layers": text.num_hidden_layers,
        "hidden_size": width,
        "intermediate_size": _size(text, "intermediate_size") or 4 * width,
        "num_attention_heads": heads,
        "num_key_value_heads": _size(text, "num_key_value_heads") or heads,
        "head_dim": head_dim + head_dim % 2,
        "max_position_embeddings": _size(text, "max_position_embeddings") or 40960,
        "rms_norm_eps": getattr(text, "rms_norm_eps", None) or 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope.get("rope_theta") or 1e6},
        **{name: _special_token_id(target_config, text, name) for name in _SPECIAL_TOKENS},
    }


def _size(text, name) -> int | None:
    """A size in a target's configuration; None where it has none, or where its layers differ in it."""
    try:
        value = getattr(text, name, None)
    except RuntimeError:  # what transformers raises for a field that is set for each layer
        return None
    return value if is_int(value, 1) else None


def _special_token_id(config, text, name):
    value = getattr(text, name, None)
    return value if value is not None else getattr(config, name, None)


def unused_token_id(text, fields, tokenizer) -> int:
    """An id the target never emits: one that is no token, else a special token that its chat template doesn't use."""
    used = set()
    for name in _SPECIAL_TOKENS:
        for value in (fields[name], getattr(tokenizer, name, None)):
            used |= set(value) if isinstance(value, list | tuple) else {value}
    ids = range(text.vocab_size)
    candidates = list(reversed(ids))
    if tokenizer is not None:
        tokens = set(tokenizer.get_vocab().values())
        template = str(tokenizer.chat_template)
        special = sorted(tokenizer.added_tokens_decoder.items(), reverse=True)
        spare = [i for i, token in special if i in ids and token.special and token.content not in template]
        candidates = [i for i in ids if i not in tokens] + spare + candidates
    return next(i for i in candidates if i not in used)


def is_int(value, low=None, high=None) -> bool:
    return (
        isinstance(value, int)
        and not isinstance(value, bool)
        and (low is None or low <= value)
        and (high is None or value <= high)
    )


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def abridged(value) -> str:
    """`repr` for error messages: of any value, in a line."""
    return _abridged.repr(value)


_abridged = reprlib.Repr()
_abridged.maxstring = _abridged.maxother = 120
_abridged.maxlist = _abridged.maxdict = 8
