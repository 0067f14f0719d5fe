"""DominoDrafter: the DFlash backbone and the Domino head in one PreTrainedModel.

Shapes: B batch, C context tokens, L slots of a block, n drafted tokens, H drafter width, V vocabulary, S causal state.
Sources: Domino, arXiv 2605.29707, section 3; DFlash, arXiv 2602.06036, section 3. Tensor names are those of the public
checkpoints.
"""

import functools
import logging
import re

import torch
from torch import nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding

from .checkpoints import LAYOUT, MAY_BE_UNUSED, check_draft_vocabulary
from .configuration_domino import DominoConfig
from .head import DominoHead
from .initialization import copy_from_target, fields_from_target
from .modeling_drafter import ContextCache, Drafter, DrafterAttention, additive, rotation

logger = logging.getLogger(__name__)

# Of a compiled drafter: tokens of the first buffers for its context. Each is twice as large as the one before.
_SMALLEST_BUCKET = 512


def visible(config: DominoConfig, layer_type: str, query_position, key_position, query_block, key_block):
    """Which keys a query of a block sees: the one rule for drafting and training, on broadcastable integer tensors.

    Args:
        query_position, key_position: positions in the sequence.
        query_block, key_block: position of the anchor of the block they belong to; -1 for a context key.

    Returns:
        Boolean tensor: context strictly before the anchor and the query's own block; sliding layers in their window.
    """
    sliding = layer_type == "sliding_attention"
    causal = sliding if config.is_causal is None else config.is_causal
    own_block = key_block == query_block
    if causal:
        own_block = own_block & (key_position <= query_position)
    seen = own_block | ((key_block < 0) & (key_position < query_block))
    return seen & (query_position - key_position < config.sliding_window) if sliding else seen


class DominoDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: DominoConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DrafterAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states, context_states, rotary, attention_mask=None, context=None, first=0):
        hidden_states = hidden_states + self.self_attn(
            self.input_layernorm(hidden_states), context_states, rotary, attention_mask, context, first
        )
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Compiled:
    """A function under `torch.compile`; where that fails, the function itself from then on.

    `warned` is shared by the functions that are compiled together: of them, only the first failure is told.
    """

    def __init__(self, function, warned: list, **options):
        self.function, self.compiled, self.warned = function, torch.compile(function, **options), warned

    def __call__(self, *args, **kwargs):
        if self.compiled is not None:
            try:
                return self.compiled(*args, **kwargs)
            except Exception as error:  # compilers fail in many ways; an error of the function's own comes up again
                self.compiled = None
                if not self.warned:
                    logger.warning(f"Drafting without torch.compile, which failed: {type(error).__name__}: {error}")
                    self.warned.append(True)
        return self.function(*args, **kwargs)


class DominoDrafter(DominoHead, Drafter):
    """A drafter for assisted generation: `target.generate(..., assistant_model=drafter)`.

    It owns neither embeddings nor an output head: both are the target's. It keeps no state between calls, so one
    drafter serves any number of calls and threads.
    """

    config_class = DominoConfig
    layout = LAYOUT
    main_input_name = "block_embeddings"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DominoDecoderLayer"]
    _keys_to_ignore_on_load_unexpected = [rf"^{re.escape(name)}" for name in MAY_BE_UNUSED]

    def __init__(self, config: DominoConfig):
        super().__init__(config)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DominoDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        if config.head == "domino":
            self.prefix_gru = nn.GRU(config.hidden_size, config.causal_state_size, batch_first=True, bias=False)
            self.embed_proj = nn.Sequential(
                nn.Linear(config.hidden_size + config.causal_state_size, config.correction_rank, bias=False),
                nn.SiLU(),
                nn.Linear(config.correction_rank, config.vocab_size, bias=False),
            )
        size = config.draft_vocabulary_size
        self.register_buffer("draft_vocabulary", None if size is None else torch.arange(size))
        self.post_init()

    def candidate_generator(self, target, generation_config, logits_processor=None):
        from .generation_domino import DominoCandidateGenerator

        return DominoCandidateGenerator(self, target, generation_config, logits_processor)

    def set_draft_vocabulary(self, token_ids) -> None:
        """Draft these tokens only. They are saved with the weights; other tokens are simply never drafted.

        The rows of the output head and of the correction that are read in a round shrink with it. Nothing is retrained,
        and what the target accepts stays as it is.

        Args:
            token_ids: distinct ids below `vocab_size`, a list or a tensor [D]; None for the whole vocabulary.

        Raises:
            ValueError: ids are repeated, out of range, or fewer than two.
        """
        if token_ids is not None:
            token_ids = torch.as_tensor(token_ids, dtype=torch.long).flatten().to(self.device)
            check_draft_vocabulary(token_ids, self.config.vocab_size)
        self.draft_vocabulary = token_ids
        self.config.draft_vocabulary_size = None if token_ids is None else len(token_ids)

    def compile(self, **options):
        """Draft with a compiled backbone and a compiled rollout of the head from now on, the same tokens as without.

        Shapes are then the same in every round until the context has doubled: the first rounds compile, later ones do
        not. Where compiling fails, drafting goes on without, with one warning.

        Args:
            options: of `torch.compile`. `mode="reduce-overhead"` replays backbone and rollout as graphs on CUDA.
        """
        warned = []
        for name in ("run_layers", "run_slots"):
            # The method takes the drafter as an argument, so that a copy of the drafter runs with its own weights.
            setattr(self, name, functools.partial(Compiled(getattr(type(self), name), warned, **options), self))

    @property
    def is_compiled(self) -> bool:
        return "run_layers" in vars(self)

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, nn.GRU):
            bound = self.config.causal_state_size**-0.5
            for weight in module.parameters():
                init.uniform_(weight, -bound, bound)
        elif self.config.head == "domino" and module is self.embed_proj[2]:
            # A new head is the identity: it starts from what the backbone already drafts.
            init.zeros_(module.weight)

    @classmethod
    def from_target(cls, target, tokenizer=None, **overrides) -> "DominoDrafter":
        """A new drafter for a target, in float32, whose layers start as copies of the target's own last ones.

        One of its features passes through unchanged at first, so that it starts near the target.

        Args:
            target: a model with layers of the Llama and Qwen kind.
            tokenizer: see [`DominoConfig.for_target`].
            overrides: fields of [`DominoConfig`] to set.

        Raises:
            ValueError: the target's layers can't be copied; the message says what doesn't fit.
        """
        config = cls.config_class.for_target(target.config, tokenizer, **fields_from_target(target, overrides))
        drafter = cls(config)
        copy_from_target(drafter, target)
        return drafter

    def forward(
        self,
        block_embeddings: torch.Tensor,
        features: torch.Tensor | None = None,
        context: ContextCache | None = None,
        position_ids: torch.Tensor | None = None,
        attention_mask: dict | None = None,
    ) -> torch.Tensor:
        """One parallel pass of the backbone over a block (DFlash, section 3).

        Args:
            block_embeddings: [B, L, H], target embeddings of the anchor and the masks.
            features: [B, C, len(target_layer_ids) * target_hidden_size], concatenated hidden states of the target for
                the tokens new to the context.
            context: keys and values of earlier context; the new ones are appended.
            position_ids: [B, C + L]. Default: counted on from the context, 0, 1, 2, ...
            attention_mask: one mask for each layer type, for [B, 1, L, keys], as the attention backend takes it.
                Default: the block stands right behind the context and sees what `visible` says.

        Returns:
            [B, L, H], one vector z per slot.
        """
        hidden_states = block_embeddings.to(self.device, self.dtype)
        if features is None:
            features = hidden_states.new_empty(hidden_states.shape[0], 0, self.fc.in_features)
        past = context.length if context is not None else 0
        anchor = past + features.shape[1]
        end = anchor + hidden_states.shape[1]
        if context is not None:
            heads, width = self.config.num_key_value_heads, self.config.head_dim
            shape = (2, len(hidden_states), heads, 0, width)
        is_round = past and features.shape[1] <= self.config.num_draft_tokens + 1
        if self.is_compiled and is_round and position_ids is attention_mask is None:
            hidden_states = self._run_bucket(hidden_states, features, context, shape)
            context.length = anchor
            return hidden_states
        if position_ids is None:
            position_ids = torch.arange(past, end, device=hidden_states.device)[None]
        masks, first = attention_mask, {}
        if masks is None:
            masks = {}
            for layer_type in set(self.config.layer_types):
                # Keys that no slot can see are not even read.
                sliding = layer_type == "sliding_attention" and context is not None
                first[layer_type] = max(0, anchor - self.config.sliding_window + 1) if sliding else 0
                masks[layer_type] = self._block_mask(layer_type, first[layer_type], anchor, end, hidden_states)
        if context is not None:
            context.reserve(end - past, shape, hidden_states)
        # Not compiled: these are passes over a whole prompt, each of another length.
        hidden_states = type(self).run_layers(self, hidden_states, features, position_ids, masks, context, first)
        if context is not None:
            context.length = anchor
        return hidden_states

    def _run_bucket(self, hidden_states, features, context, shape):
        """A round of [`forward`] with the same shapes in every round, until the context has doubled.

        The features are padded to the most that a round can bring. What they leave behind the context stands where the
        next features are written, and is not seen; the block stands at the end of the buffer.
        """
        past, new, slots = context.length, features.shape[1], hidden_states.shape[1]
        most = self.config.num_draft_tokens + 1
        bucket = max(_SMALLEST_BUCKET, 1 << (past + most - 1).bit_length())
        block = torch.arange(past + new, past + new + slots, device=hidden_states.device)
        keys = torch.arange(bucket, device=hidden_states.device)
        places = torch.cat([keys[past : past + most], torch.arange(bucket, bucket + slots, device=keys.device)])
        context.reserve_bucket(bucket + slots, places, shape, hidden_states)
        position_ids = torch.cat([keys[past : past + most], block])[None]
        key_block = torch.cat([torch.full_like(keys, -1), torch.full_like(block, past + new)])
        keys, queries = torch.cat([keys, block]), block[:, None]
        masks = {}
        for layer_type in set(self.config.layer_types):
            seen = visible(self.config, layer_type, queries, keys, past + new, key_block)
            masks[layer_type] = additive(seen, hidden_states.dtype)
        features = torch.nn.functional.pad(features, (0, 0, 0, most - new))
        return self.run_layers(hidden_states, features, position_ids, masks, context, {})

    def run_layers(self, hidden_states, features, position_ids, masks, context, first) -> torch.Tensor:
        """The arithmetic of `forward`, which [`compile`] compiles."""
        context_states = self.hidden_norm(self.fc(features.to(hidden_states)))
        rotary = rotation(self.rotary_emb, hidden_states, position_ids)
        for layer, layer_type in zip(self.layers, self.config.layer_types):
            hidden_states = layer(
                hidden_states, context_states, rotary, masks[layer_type], context, first.get(layer_type, 0)
            )
        return self.norm(hidden_states)

    def _block_mask(self, layer_type, first, anchor, end, like):
        """Additive mask [1, 1, L, keys] of a block behind its context; None where it sees everything."""
        if layer_type == "full_attention" and not self.config.is_causal:
            return None
        keys = torch.arange(first, end, device=like.device)
        queries = torch.arange(anchor, end, device=like.device)[:, None]
        key_block = torch.where(keys < anchor, -1, anchor)
        seen = visible(self.config, layer_type, queries, keys, anchor, key_block)
        return additive(seen, like.dtype)


DominoConfig.register_for_auto_class()
DominoDrafter.register_for_auto_class("AutoModel")

if not __name__.startswith("hf_domino."):
    # Loaded from a checkpoint folder as remote code: no package import has connected generate().
    from .assisted_generation import connect

    connect()
