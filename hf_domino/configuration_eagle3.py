"""Eagle3Config: everything an EAGLE-3 drafter must know about itself and its target, checked when it is built."""

from transformers import PreTrainedConfig

from .configuration_drafter import DrafterConfig, fields_for_target

_MAX_DRAFT_TOKENS = 64


def usual_layers(num_target_layers: int) -> list[int]:
    """The target layers that EAGLE-3 reads unless a checkpoint says otherwise, as zero-based layers by their outputs.

    The authors' code takes what enters layers 2, L // 2 and L - 3 of L. In a shallow target some are the same.
    """
    return [1, num_target_layers // 2 - 1, num_target_layers - 4]


class Eagle3Config(DrafterConfig):
    r"""
    Configuration of an [`Eagle3Drafter`].

    What the drafter needs to know of its target:

    Args:
        vocab_size (`int`): Rows of the target's output head. Required.
        target_layer_ids (`list[int]`, *optional*): Zero-based target decoder layers whose outputs are the features, in
            the order in which they are concatenated. The output of layer `i` is `hidden_states[i + 1]` of transformers.
            Default: [`usual_layers`] of the target that it drafts for.
        target_hidden_size (`int`): Width of those hidden states. Default: `hidden_size`.
        num_target_layers (`int`, *optional*): Decoder layers of the target, checked against it when known.

    What is drafted:

    Args:
        num_draft_tokens (`int`): Tokens drafted in a round, each from the one before. A call may ask for others, from 1
            to 64. The default is 5: training unrolls 7 steps (paper, section 3.2), but each token costs a pass of the
            drafter and of its output head, and is reached less often than the one before.
        draft_vocabulary_size (`int`, *optional*): Rows of the drafter's own output head (public name:
            `draft_vocab_size`). Default, and where it is `vocab_size`: one for every token.

    The layer:

    Args:
        hidden_size (`int`): Width of the drafter and of the target's token embeddings.
        norm_before_residual (`bool`): Whether the residual is the features' projection behind `hidden_norm`, as in most
            drafters of speculators, or in front of it, as in the paper's.
        intermediate_size, num_attention_heads, num_key_value_heads, head_dim, hidden_act, rms_norm_eps,
        initializer_range, max_position_embeddings, rope_parameters, attention_bias, attention_dropout:
            as in transformers' Llama. Rotary positions are the drafter's own: 0, 1, 2, ... over real tokens.
        use_qk_norm (`bool`): RMS-normalise queries and keys per head, as in Qwen3.

    Raises:
        ValueError: a field is missing or outside its range; the message names field, value and range.
    """

    model_type = "eagle3"
    has_no_defaults_at_init = True

    _integers = {**DrafterConfig._integers, "num_draft_tokens": (1, _MAX_DRAFT_TOKENS)}
    _choices = {**DrafterConfig._choices, "norm_before_residual": (True, False)}

    num_draft_tokens: int = 5
    norm_before_residual: bool = False
    use_qk_norm: bool = False

    def _check_own_fields(self):
        if self.draft_vocabulary_size == self.vocab_size:
            self.draft_vocabulary_size = None
        if self.target_layer_ids is not None:
            self._check_target_layers(self.target_layer_ids)

    @property
    def method(self) -> str:
        """What the drafter is, in one word."""
        return "eagle3"

    @property
    def max_draft_tokens(self) -> int:
        """The most tokens that a call may ask for in one round."""
        return _MAX_DRAFT_TOKENS

    @property
    def num_features(self) -> int:
        """Width of the concatenated features."""
        return self.target_hidden_size * len(self.target_layer_ids or usual_layers(0))

    def feature_layers(self, num_target_layers: int) -> list[int]:
        return self.target_layer_ids or usual_layers(num_target_layers)

    @classmethod
    def for_target(cls, target_config: PreTrainedConfig, **overrides) -> "Eagle3Config":
        """A drafter configuration that fits a decoder target, nested text configs of image-text models included.

        Args:
            target_config: the target's configuration.
            overrides: fields of [`Eagle3Config`] to set.

        Raises:
            ValueError: the target is an encoder-decoder model, has no usable size, or an override is out of range.
        """
        return cls(**{**fields_for_target(target_config), **overrides})
