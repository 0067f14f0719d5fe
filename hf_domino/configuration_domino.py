"""DominoConfig: everything a drafter must know about itself and its target, checked when it is built."""

from transformers import PreTrainedConfig

from .configuration_drafter import (
    LAYER_TYPES,
    DrafterConfig,
    fields_for_target,
    is_int,
    unused_token_id,
)


def evenly_spread_layers(num_target_layers: int, count: int) -> list[int]:
    """`count` target layers from the second to the third from last (DFlash, arXiv 2602.06036, section 3).

    Returns sorted, distinct zero-based decoder layer ids; a target with fewer layers than `count` gives fewer.
    """
    if count == 1:
        return [num_target_layers // 2]
    first = min(1, num_target_layers - 1)
    last = max(first, num_target_layers - 3)
    return sorted({round(first + i * (last - first) / (count - 1)) for i in range(count)})


class DominoConfig(DrafterConfig):
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

    _integers = {
        **DrafterConfig._integers,
        "num_hidden_layers": (1, 128),
        "block_size": (2, 1024),
        "num_uncorrected_tokens": (0, 1024),
        "causal_state_size": (1, 2**16),
        "correction_rank": (1, 2**16),
    }
    _choices = {
        **DrafterConfig._choices,
        "head": ("domino", "none"),
        "sample_from_anchor": (True, False),
        "is_causal": (None, True, False),
    }
    _parts_of_vocabulary = ("num_correction_candidates", "draft_vocabulary_size")

    mask_token_id: int | None = None

    block_size: int = 16
    sample_from_anchor: bool = True
    head: str = "domino"
    num_uncorrected_tokens: int = 1
    causal_state_size: int = 1024
    correction_rank: int = 256
    num_correction_candidates: int | None = None

    num_hidden_layers: int = 5
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    is_causal: bool | None = None

    def _check_own_fields(self):
        self._check_mask_token()
        ids, depth = self.target_layer_ids, self.num_target_layers
        if ids is None and depth is not None:
            ids = evenly_spread_layers(depth, self.num_hidden_layers)
        self._check_target_layers(ids)
        self._check_layer_types()

    def _check_mask_token(self):
        if not is_int(self.mask_token_id, 0, self.vocab_size - 1):
            self._refuse(
                "mask_token_id", f"an integer from 0 to {self.vocab_size - 1} (vocab_size - 1)", self.mask_token_id
            )
        eos = self.eos_token_id if isinstance(self.eos_token_id, list | tuple) else [self.eos_token_id]
        if self.mask_token_id in eos:
            self._refuse("mask_token_id", "an id that the target never emits, not an eos_token_id", self.mask_token_id)

    def _check_layer_types(self):
        count, types = self.num_hidden_layers, self.layer_types
        if types is None:
            types = ["full_attention"] * count
        is_list = isinstance(types, list | tuple) and len(types) == count
        if not is_list or not all(name in LAYER_TYPES for name in types):
            self._refuse(
                "layer_types", f"a list of {count} (num_hidden_layers) values out of {', '.join(LAYER_TYPES)}", types
            )
        self.layer_types = list(types)
        if "sliding_attention" in types and not is_int(self.sliding_window, self.block_size):
            self._refuse(
                "sliding_window",
                f"an integer of at least block_size ({self.block_size}), as layer_types has sliding layers",
                self.sliding_window,
            )

    @property
    def num_draft_tokens(self) -> int:
        """Tokens drafted in one round."""
        return self.block_size - self.first_draft_slot

    @property
    def first_draft_slot(self) -> int:
        """The slot of the block that predicts the first draft."""
        return 0 if self.sample_from_anchor else 1

    @property
    def method(self) -> str:
        """What the drafter is, in one word."""
        return "domino" if self.head == "domino" else "dflash"

    @property
    def max_draft_tokens(self) -> int:
        """The most tokens that a call may ask for in one round: a block has no more."""
        return self.num_draft_tokens

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
        fields = fields_for_target(target_config)
        fields["num_hidden_layers"] = min(5, fields["num_target_layers"])
        if overrides.get("mask_token_id") is None:
            text = target_config.get_text_config(decoder=True)
            overrides["mask_token_id"] = unused_token_id(text, fields, tokenizer)
        return cls(**{**fields, **overrides})
