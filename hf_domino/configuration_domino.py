"""DominoConfig: everything a drafter must know about itself and its target, checked when it is built."""

import reprlib

import torch
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

# field -> smallest and largest value that makes sense. The upper ends are far above any published drafter; they stop
# a damaged or hostile config.json before memory is asked for.
_INTEGERS = {
    "vocab_size": (2, 2**24),
    "hidden_size": (1, 2**16),
    "target_hidden_size": (1, 2**16),
    "intermediate_size": (1, 2**20),
    "num_hidden_layers": (1, 128),
    "num_attention_heads": (1, 1024),
    "num_key_value_heads": (1, 1024),
    "head_dim": (2, 4096),
    "max_position_embeddings": (1, 2**30),
    "block_size": (2, 1024),
    "num_uncorrected_tokens": (0, 1024),
    "causal_state_size": (1, 2**16),
    "correction_rank": (1, 2**16),
}
_NUMBERS = {"rms_norm_eps": (0, 1), "initializer_range": (0, 100), "attention_dropout": (0, 1)}
_CHOICES = {
    "head": ("domino", "none"),
    "hidden_act": tuple(ACT2FN),
    "sample_from_anchor": (True, False),
    "use_qk_norm": (True, False),
    "attention_bias": (True, False),
    "is_causal": (None, True, False),
}
_MAX_TARGET_LAYERS = 4096
_LAYER_TYPES = ("full_attention", "sliding_attention")
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
# What is read from a config.json beside the fields below. Other keys stay where they are: some of them would make
# transformers read other files, or take memory, without a check.
_FILE_KEYS = {"auto_map", "dtype", "torch_dtype", "rope_scaling", "rope_theta"}


def evenly_spread_layers(num_target_layers: int, count: int) -> list[int]:
    """`count` target layers from the second to the third from last (DFlash, arXiv 2602.06036, section 3).

    Returns sorted, distinct zero-based decoder layer ids; a target with fewer layers than `count` gives fewer.
    """
    if count == 1:
        return [num_target_layers // 2]
    first = min(1, num_target_layers - 1)
    last = max(first, num_target_layers - 3)
    return sorted({round(first + i * (last - first) / (count - 1)) for i in range(count)})


class DominoConfig(PreTrainedConfig):
    r"""
    Configuration of a [`DominoDrafter`].

    What the drafter needs to know of its target:

    Args:
        vocab_size (`int`): Rows of the target's output head. Required.
        mask_token_id (`int`): The token id that stands in the block for a token still to be drafted. Required; an id
            that the target never emits, below `vocab_size`.
        target_layer_ids (`list[int]`): Zero-based target decoder layers whose outputs are the features, in the order
            in which they are concatenated. The output of layer `i` is `hidden_states[i + 1]` of transformers; that of
            the last layer is therefore the final-normed one. Default: evenly spread over `num_target_layers`.
        target_hidden_size (`int`): Width of those hidden states. Default: `hidden_size`.
        num_target_layers (`int`, *optional*): Decoder layers of the target, checked against it when known.

    The block (paper, section 3):

    Args:
        block_size (`int`): Slots of a block, the anchor included.
        sample_from_anchor (`bool`): Block alignment (public name: `shift_label`). True: every slot predicts the token
            after its own position, so the anchor's slot drafts too. False: a slot predicts the token at its own
            position and the anchor's slot drafts nothing.
        head (`str`): `"domino"`, or `"none"` for DFlash.
        num_uncorrected_tokens (`int`): First drafts of a block that are taken from the base logits alone (public name:
            `pure_draft_prefix_len`).
        causal_state_size (`int`): Width of the GRU's causal state (public name: `gru_hidden_dim`).
        correction_rank (`int`): Rank of the correction (public name: `emb_dim`).
        num_correction_candidates (`int`, *optional*): Correct only so many of a slot's largest base logits and choose
            among them. Default: all, which is exact. A `GenerationConfig(num_correction_candidates=...)` sets it for a
            call.
        draft_vocabulary_size (`int`, *optional*): Tokens of the draft vocabulary that is saved with the weights, see
            [`DominoDrafter.set_draft_vocabulary`]. Default: the drafter has none and drafts any token.

    The backbone:

    Args:
        hidden_size (`int`): Width of the drafter: that of the target's token embeddings and of its output head's input.
        intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim, hidden_act,
        rms_norm_eps, initializer_range, max_position_embeddings, rope_parameters, attention_bias, attention_dropout:
            as in transformers' Qwen3. Rotary positions are the drafter's own: 0, 1, 2, ... over real tokens.
        use_qk_norm (`bool`): RMS-normalise queries and keys per head.
        layer_types (`list[str]`): `"full_attention"` or `"sliding_attention"` for each layer. Default: all full.
        sliding_window (`int`, *optional*): Window of the sliding layers: a query sees keys less than this far back.
        is_causal (`bool`, *optional*): Attention inside the block. Default (None), the convention of the published
            drafters: full layers see the block in both directions, sliding layers only backwards
            (sgl-project/sglang#34524 measured both).

    Raises:
        ValueError: a field is missing or outside its range; the message names field, value and range.
    """

    model_type = "domino"
    has_no_defaults_at_init = True

    vocab_size: int | None = None
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    target_hidden_size: int | None = None
    num_target_layers: int | None = None

    block_size: int = 16
    sample_from_anchor: bool = True
    head: str = "domino"
    num_uncorrected_tokens: int = 1
    causal_state_size: int = 1024
    correction_rank: int = 256
    num_correction_candidates: int | None = None
    draft_vocabulary_size: int | None = None

    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_hidden_layers: int = 5
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
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    is_causal: bool | None = None

    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs):
        self._check_dtype(self.dtype if self.dtype is not None else kwargs.get("torch_dtype"))
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None and _is_int(self.hidden_size) and _is_int(self.num_attention_heads, 1):
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        self._check_values()
        self._check_optional_sizes()
        self._check_mask_token()
        self._check_heads()
        self._check_target_layers()
        self._check_layer_types()
        self._check_rope_layout(self.rope_parameters, kwargs.get("rope_scaling"))
        super().__post_init__(**kwargs)
        self._check_rope_values()

    def _check_dtype(self, dtype):
        if isinstance(dtype, str):
            dtype = getattr(torch, dtype, dtype)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            _refuse("dtype", "a floating point type", dtype)

    def _check_values(self):
        for field, (low, high) in _INTEGERS.items():
            if not _is_int(getattr(self, field), low, high):
                _refuse(field, f"an integer from {low} to {high}", getattr(self, field))
        for field, (low, high) in _NUMBERS.items():
            if not _is_number(value := getattr(self, field)) or not low <= value <= high:
                _refuse(field, f"a number from {low} to {high}", value)
        for field, choices in _CHOICES.items():
            value = getattr(self, field)
            if not any(type(value) is type(choice) and value == choice for choice in choices):
                _refuse(field, f"one of {', '.join(map(str, choices))}", value)

    def _check_optional_sizes(self):
        for field in ("num_correction_candidates", "draft_vocabulary_size"):
            value = getattr(self, field)
            if value is not None and not _is_int(value, 2, self.vocab_size):
                _refuse(field, f"an integer from 2 to {self.vocab_size} (vocab_size)", value)

    def _check_mask_token(self):
        if not _is_int(self.mask_token_id, 0, self.vocab_size - 1):
            _refuse("mask_token_id", f"an integer from 0 to {self.vocab_size - 1} (vocab_size - 1)", self.mask_token_id)
        eos = self.eos_token_id if isinstance(self.eos_token_id, list | tuple) else [self.eos_token_id]
        if self.mask_token_id in eos:
            _refuse("mask_token_id", "an id that the target never emits, not an eos_token_id", self.mask_token_id)

    def _check_heads(self):
        if self.num_attention_heads % self.num_key_value_heads:
            _refuse(
                "num_key_value_heads",
                f"a divisor of num_attention_heads ({self.num_attention_heads})",
                self.num_key_value_heads,
            )
        if self.head_dim % 2:
            _refuse("head_dim", "even, for rotary positions", self.head_dim)

    def _check_target_layers(self):
        depth, ids = self.num_target_layers, self.target_layer_ids
        if depth is not None and not _is_int(depth, 1, _MAX_TARGET_LAYERS):
            _refuse("num_target_layers", f"an integer from 1 to {_MAX_TARGET_LAYERS}", depth)
        if ids is None and depth is not None:
            ids = evenly_spread_layers(depth, self.num_hidden_layers)
        last = (depth or _MAX_TARGET_LAYERS) - 1
        is_list = isinstance(ids, list | tuple) and 0 < len(ids) <= last + 1
        if not is_list or not all(_is_int(i, 0, last) for i in ids) or len(set(ids)) != len(ids):
            _refuse("target_layer_ids", f"a list of distinct layer ids from 0 to {last}", ids)
        self.target_layer_ids = list(ids)

    def _check_layer_types(self):
        count, types = self.num_hidden_layers, self.layer_types
        if types is None:
            types = ["full_attention"] * count
        is_list = isinstance(types, list | tuple) and len(types) == count
        if not is_list or not all(name in _LAYER_TYPES for name in types):
            _refuse(
                "layer_types", f"a list of {count} (num_hidden_layers) values out of {', '.join(_LAYER_TYPES)}", types
            )
        self.layer_types = list(types)
        if "sliding_attention" in types and not _is_int(self.sliding_window, self.block_size):
            _refuse(
                "sliding_window",
                f"an integer of at least block_size ({self.block_size}), as layer_types has sliding layers",
                self.sliding_window,
            )

    def _check_rope_layout(self, *values):
        for value in values:
            if value is not None and (not isinstance(value, dict) or any(name in value for name in _LAYER_TYPES)):
                _refuse("rope_parameters", "one object for all layers", value)

    def _check_rope_values(self):
        rope = self.rope_parameters
        rope_type = rope.get("rope_type")
        if rope_type not in tuple(_ROPE_TYPES):
            _refuse("rope_parameters", f"of a rope_type out of {', '.join(_ROPE_TYPES)}", rope)
        for name, (low, high) in _ROPE_NUMBERS.items():
            value = rope.get(name)
            is_needed = name == "rope_theta" or name in _ROPE_TYPES[rope_type]
            if (value is not None or is_needed) and not (_is_number(value) and low <= value <= high):
                _refuse("rope_parameters", f"with a number from {low} to {high} for {name}", rope)

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """As in transformers, with fields given as keyword arguments checked like those of `config_dict`."""
        fields = cls.own_fields()
        config_dict = {name: value for name, value in config_dict.items() if name in fields | _FILE_KEYS}
        overrides = {name: kwargs.pop(name) for name in fields & kwargs.keys()}
        return super().from_dict({**config_dict, **overrides}, **kwargs)

    @classmethod
    def own_fields(cls) -> set[str]:
        """Names of the fields that a `DominoConfig` has beside those of every transformers configuration."""
        return cls.__dataclass_fields__.keys() - PreTrainedConfig.__dataclass_fields__.keys()

    @property
    def num_draft_tokens(self) -> int:
        """Tokens drafted in one round."""
        return self.block_size - self.first_draft_slot

    @property
    def first_draft_slot(self) -> int:
        """The slot of the block that predicts the first draft."""
        return 0 if self.sample_from_anchor else 1

    @classmethod
    def for_target(cls, target_config: PreTrainedConfig, tokenizer=None, **overrides) -> "DominoConfig":
        """A drafter configuration that fits a decoder target, nested text configs of image-text models included.

        Args:
            target_config: the target's configuration.
            tokenizer: the target's tokenizer; lets an unused `mask_token_id` be found for certain.
            overrides: fields of [`DominoConfig`] to set.

        Raises:
            ValueError: the target is an encoder-decoder model, has no usable size, or an override is out of range.
        """
        if target_config.is_encoder_decoder:
            raise ValueError(
                f"A Domino drafter needs a decoder-only target, but {target_config.model_type!r} is an encoder-decoder."
            )
        text = target_config.get_text_config(decoder=True)
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        if missing := [name for name in sizes if _size(text, name) is None]:
            raise ValueError(
                f"The configuration of {target_config.model_type!r} has no usable {', '.join(missing)}, which a Domino "
                "drafter is sized by."
            )
        width = _size(text, "word_embed_proj_dim") or text.hidden_size
        heads = text.num_attention_heads
        head_dim = _size(text, "head_dim") or width // heads
        rope = getattr(text, "rope_parameters", None) or {}
        rope = rope.get("full_attention") or rope
        fields = {
            "vocab_size": text.vocab_size,
            "target_hidden_size": text.hidden_size,
            "num_target_layers": text.num_hidden_layers,
            "hidden_size": width,
            "intermediate_size": _size(text, "intermediate_size") or 4 * width,
            "num_hidden_layers": min(5, text.num_hidden_layers),
            "num_attention_heads": heads,
            "num_key_value_heads": _size(text, "num_key_value_heads") or heads,
            "head_dim": head_dim + head_dim % 2,
            "max_position_embeddings": _size(text, "max_position_embeddings") or 40960,
            "rms_norm_eps": getattr(text, "rms_norm_eps", None) or 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": rope.get("rope_theta") or 1e6},
            **{name: _special_token_id(target_config, text, name) for name in _SPECIAL_TOKENS},
        }
        if overrides.get("mask_token_id") is None:
            overrides["mask_token_id"] = _unused_token_id(text, fields, tokenizer)
        return cls(**{**fields, **overrides})


_SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def _size(text, name) -> int | None:
    """A size in a target's configuration; None where it has none, or where its layers differ in it."""
    try:
        value = getattr(text, name, None)
    except RuntimeError:  # what transformers raises for a field that is set for each layer
        return None
    return value if _is_int(value, 1) else None


def _special_token_id(config, text, name):
    value = getattr(text, name, None)
    return value if value is not None else getattr(config, name, None)


def _unused_token_id(text, fields, tokenizer) -> int:
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


def _is_int(value, low=None, high=None) -> bool:
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


def _refuse(field, requirement, value):
    raise ValueError(f"DominoConfig.{field} must be {requirement}, but is {abridged(value)}.")
