"""DominoConfig: everything a drafter must know about itself and its target, checked when it is built."""

from transformers import PreTrainedConfig

# field -> smallest and largest value that makes sense. The upper ends are far above any published drafter; they stop
# a damaged or hostile config.json before memory is asked for.
_INTEGER_RANGES = {
    "hidden_size": (1, 2**16),
    "intermediate_size": (1, 2**20),
    "num_hidden_layers": (1, 128),
    "num_attention_heads": (1, 1024),
    "num_key_value_heads": (1, 1024),
    "head_dim": (2, 4096),
    "max_position_embeddings": (1, 2**30),
    "block_size": (2, 1024),
    "mask_token_id": (0, 2**24 - 1),
    "target_hidden_size": (1, 2**16),
    "vocab_size": (2, 2**24),
    "num_uncorrected_tokens": (0, 1024),
    "causal_state_size": (1, 2**16),
    "correction_rank": (1, 2**16),
}
_HEADS = ("domino", "none")
_LAYER_TYPES = ("full_attention", "sliding_attention")


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
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None and isinstance(self.hidden_size, int) and self.num_attention_heads:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.layer_types is None and isinstance(self.num_hidden_layers, int):
            self.layer_types = ["full_attention"] * min(self.num_hidden_layers, 128)
        self._check_sizes()
        if self.target_layer_ids is None and self.num_target_layers is not None:
            self.target_layer_ids = evenly_spread_layers(self.num_target_layers, self.num_hidden_layers)
        self._check_target_layers()
        self._check_choices()
        super().__post_init__(**kwargs)

    def _check_sizes(self):
        for field, (low, high) in _INTEGER_RANGES.items():
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise ValueError(f"DominoConfig.{field} must be an integer from {low} to {high}, but is {value!r}.")
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(
                f"DominoConfig.mask_token_id must be below vocab_size ({self.vocab_size}), but is {self.mask_token_id}."
            )
        eos = self.eos_token_id if isinstance(self.eos_token_id, list | tuple) else [self.eos_token_id]
        if self.mask_token_id in eos:
            raise ValueError(
                f"DominoConfig.mask_token_id is {self.mask_token_id}, which is also an eos_token_id "
                f"({self.eos_token_id}); it must be an id that the target never emits."
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"DominoConfig.num_key_value_heads must divide num_attention_heads ({self.num_attention_heads}), "
                f"but is {self.num_key_value_heads}."
            )
        if self.head_dim % 2:
            raise ValueError(f"DominoConfig.head_dim must be even (rotary positions), but is {self.head_dim}.")

    def _check_target_layers(self):
        ids, depth = self.target_layer_ids, self.num_target_layers
        if depth is not None and (not isinstance(depth, int) or not 1 <= depth <= 4096):
            raise ValueError(f"DominoConfig.num_target_layers must be an integer from 1 to 4096, but is {depth!r}.")
        highest = (depth or 4096) - 1
        if (
            not isinstance(ids, list | tuple)
            or not ids
            or len(set(ids)) != len(ids)
            or not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= highest for i in ids)
        ):
            raise ValueError(
                f"DominoConfig.target_layer_ids must be a list of distinct layer ids from 0 to {highest}, "
                f"but is {ids!r}."
            )
        self.target_layer_ids = list(ids)

    def _check_choices(self):
        if self.head not in _HEADS:
            raise ValueError(f"DominoConfig.head must be one of {_HEADS}, but is {self.head!r}.")
        if not isinstance(self.sample_from_anchor, bool):
            raise ValueError(
                f"DominoConfig.sample_from_anchor must be true or false, but is {self.sample_from_anchor!r}."
            )
        if self.is_causal not in (None, True, False):
            raise ValueError(f"DominoConfig.is_causal must be true, false or null, but is {self.is_causal!r}.")
        if len(self.layer_types) != self.num_hidden_layers or not set(self.layer_types) <= set(_LAYER_TYPES):
            raise ValueError(
                f"DominoConfig.layer_types must be {self.num_hidden_layers} (num_hidden_layers) values out of "
                f"{_LAYER_TYPES}, but is {self.layer_types!r}."
            )
        window = self.sliding_window
        if "sliding_attention" in self.layer_types and (not isinstance(window, int) or window < self.block_size):
            raise ValueError(
                "DominoConfig.sliding_window must be an integer of at least block_size "
                f"({self.block_size}) when layer_types has sliding layers, but is {window!r}."
            )

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
        width = getattr(text, "word_embed_proj_dim", None) or text.hidden_size
        heads = text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or width // heads
        rope = getattr(text, "rope_parameters", None) or {}
        rope = rope.get("full_attention") or rope
        fields = {
            "vocab_size": text.vocab_size,
            "target_hidden_size": text.hidden_size,
            "num_target_layers": text.num_hidden_layers,
            "hidden_size": width,
            "intermediate_size": getattr(text, "intermediate_size", None) or 4 * width,
            "num_hidden_layers": min(5, text.num_hidden_layers),
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
            "head_dim": head_dim + head_dim % 2,
            "max_position_embeddings": getattr(text, "max_position_embeddings", None) or 40960,
            "rms_norm_eps": getattr(text, "rms_norm_eps", None) or 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": rope.get("rope_theta") or 1e6},
            **{name: _special_token_id(target_config, text, name) for name in _SPECIAL_TOKENS},
        }
        if overrides.get("mask_token_id") is None:
            overrides["mask_token_id"] = _unused_token_id(text, fields, tokenizer)
        return cls(**{**fields, **overrides})


_SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def _special_token_id(config, text, name):
    value = getattr(text, name, None)
    return value if value is not None else getattr(config, name, None)


def _unused_token_id(text, fields, tokenizer) -> int:
    """An id the target never emits: a padding row of its vocabulary if there is one, else a spare special token."""
    used = set()
    for name in _SPECIAL_TOKENS:
        value = fields[name]
        used |= set(value) if isinstance(value, list | tuple) else {value}
    if tokenizer is not None:
        if len(tokenizer) < text.vocab_size:
            return len(tokenizer)
        template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
        for token_id, token in sorted(tokenizer.added_tokens_decoder.items(), reverse=True):
            if token.special and token_id not in used and token.content not in template:
                return token_id
    return next(i for i in range(text.vocab_size - 1, -1, -1) if i not in used)
