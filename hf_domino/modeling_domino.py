"""DominoDrafter: the DFlash backbone and the Domino head in one PreTrainedModel.

Shapes: B batch, C context tokens, L slots of a block, n drafted tokens, H drafter width, V vocabulary, S causal state.
Sources: Domino, arXiv 2605.29707, section 3; DFlash, arXiv 2602.06036, section 3. Tensor names are those of the public
checkpoints.
"""

import functools
import importlib
import inspect
import logging
import re
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
)

from .checkpoints import MAY_BE_UNUSED, check_draft_vocabulary, load_drafter
from .configuration_domino import DominoConfig
from .head import DominoHead
from .initialization import copy_from_target, fields_from_target

logger = logging.getLogger(__name__)

# Of a compiled drafter: tokens of the first buffers for its context. Each is twice as large as the one before.
_SMALLEST_BUCKET = 512


class ContextCache:
    """Keys and values of the context for every layer: the drafter's only memory between rounds.

    It only ever holds verified tokens, so nothing is rolled back. A block's own keys and values are written behind the
    context as scratch, and the next round writes over them. Buffers double when they are full.
    """

    def __init__(self, num_layers: int):
        self.length = 0
        self.places = None
        self._layers = [None] * num_layers

    def reserve(self, num_new: int, shape: tuple, like: torch.Tensor) -> None:
        """Make room for `num_new` tokens behind the context; `shape` is (2, B, heads, *, head_dim) of all layers."""
        self.places = None
        end = self.length + num_new
        self._resize(lambda size: size >= end, max(2 * self.length, end + 256), shape, like)

    def reserve_bucket(self, size: int, places: torch.Tensor, shape: tuple, like: torch.Tensor) -> None:
        """Buffers of exactly `size` tokens, read as a whole from now on, and where the new ones stand in them.

        Nothing that a graph replays then depends on the length of the context but the numbers in `places` and the mask.
        """
        self.places = places
        for buffer in self._resize(lambda old: old == size, size, shape, like):
            torch._dynamo.mark_static_address(buffer)

    def _resize(self, fits, size, shape, like) -> list[torch.Tensor]:
        new = []
        for i, buffer in enumerate(self._layers):
            # What an earlier turn wrote in inference mode can be read outside of it, but not written.
            is_locked = buffer is not None and buffer.is_inference() and not torch.is_inference_mode_enabled()
            if buffer is None or not fits(buffer.shape[-2]) or is_locked:
                self._layers[i] = like.new_zeros(*shape[:3], size, shape[-1])
                if buffer is not None:
                    self._layers[i][..., : self.length, :] = buffer[..., : self.length, :]
                new.append(self._layers[i])
        return new

    def update(self, layer_idx: int, states: torch.Tensor, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `states` [2, B, heads, C + L, head_dim] (keys, values) into the room behind the context.

        Returns keys and values from token `first` on, [B, heads, length + C + L - first, head_dim] each; of a bucket
        all of it.
        """
        buffer = self._layers[layer_idx]
        if self.places is not None:
            return buffer.index_copy_(-2, self.places, states.to(buffer.dtype)).unbind(0)
        end = self.length + states.shape[-2]
        buffer[..., self.length : end, :] = states
        return buffer[..., first:end, :].unbind(0)


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


def additive(seen: torch.Tensor, dtype) -> torch.Tensor:
    """The mask [1, 1, L, keys] that attention adds, from what is seen, [L, keys]."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)[None, None]


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of [B, heads, T, head_dim]; `sin` is negative in the first half of head_dim."""
    return states * cos + states.roll(states.shape[-1] // 2, dims=-1) * sin


class DominoAttention(nn.Module):
    """Attention of a block over the context and itself; both pass through this layer's own key and value weights."""

    def __init__(self, config: DominoConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.is_causal = False
        width, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, config.num_attention_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, width, bias=bias)
        norm = Qwen3RMSNorm if config.use_qk_norm else lambda *args, **kwargs: nn.Identity()
        self.q_norm = norm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = norm(config.head_dim, eps=config.rms_norm_eps)

    def forward(self, hidden_states, context_states, rotary, attention_mask, context, first):
        """hidden_states [B, L, H], context_states [B, C, H] -> [B, L, H]."""
        batch, slots = hidden_states.shape[:2]
        keys_of = torch.cat([context_states, hidden_states], dim=1)
        shape = (batch, -1, self.config.num_key_value_heads, self.head_dim)
        query = self.q_norm(self.q_proj(hidden_states).view(batch, slots, -1, self.head_dim)).transpose(1, 2)
        key = self.k_norm(self.k_proj(keys_of).view(shape)).transpose(1, 2)
        value = self.v_proj(keys_of).view(shape).transpose(1, 2)
        cos, sin = rotary
        query = rotate(query, cos[..., -slots:, :], sin[..., -slots:, :])
        key = rotate(key, cos, sin)
        # Under autocast these two are float32 by now, and not every backend takes mixed dtypes.
        query, key = query.to(value.dtype), key.to(value.dtype)
        if context is not None:
            key, value = context.update(self.layer_idx, torch.stack([key, value]), first)
        implementation = self.config._attn_implementation
        if implementation == "flex_attention" and isinstance(attention_mask, torch.Tensor | None):
            # A single block is no work for flex attention, whose kernels read past the end of a tensor mask.
            implementation = "sdpa"
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        # Dropout belongs to training steps: a drafter left in train mode still drafts without it.
        dropout = self.config.attention_dropout if self.training and torch.is_grad_enabled() else 0.0
        output, _ = attend(self, query, key, value, attention_mask, scaling=self.scaling, dropout=dropout)
        return self.o_proj(output.reshape(batch, slots, -1))


class DominoDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: DominoConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DominoAttention(config, layer_idx)
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


class DominoDrafter(DominoHead, PreTrainedModel):
    """A drafter for assisted generation: `target.generate(..., assistant_model=drafter)`.

    It owns neither embeddings nor an output head: both are the target's. It keeps no state between calls, so one
    drafter serves any number of calls and threads.
    """

    config_class = DominoConfig
    base_model_prefix = ""
    main_input_name = "block_embeddings"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DominoDecoderLayer"]
    _keys_to_ignore_on_load_unexpected = [rf"^{re.escape(name)}" for name in MAY_BE_UNUSED]
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True

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
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, config=None, **kwargs):
        """Load a drafter: one saved by hf_domino, or a public Domino, DFlash or speculators checkpoint as published.

        Takes what `PreTrainedModel.from_pretrained` takes. Only safetensors are read.

        Raises:
            ValueError: the folder is no drafter, or its configuration or weights don't fit one; the message says how.
        """
        return load_drafter(cls, super().from_pretrained, pretrained_model_name_or_path, config, model_args, kwargs)

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

    def save_pretrained(self, save_directory, *args, push_to_hub=False, **kwargs):
        """As in transformers. The tensors keep the names they have here, whatever file they were loaded from.

        With `push_to_hub=True`, [`push_to_hub`] follows; it takes `repo_id` (default: the folder's name) and all else
        that saving does not.
        """
        own = inspect.signature(PreTrainedModel.save_pretrained).parameters
        pushing = {name: kwargs.pop(name) for name in [*kwargs] if name not in own} if push_to_hub else {}
        super().save_pretrained(save_directory, *args, **{"save_original_format": False, **kwargs})
        if push_to_hub and kwargs.get("is_main_process", True):
            repo_id = pushing.pop("repo_id", None) or Path(save_directory).resolve().name
            both = {name: kwargs[name] for name in ("token", "max_shard_size") if name in kwargs}
            self.push_to_hub(repo_id, **pushing, **both)

    def push_to_hub(self, repo_id, **kwargs):
        """Push the drafter, with a card where the Hub has none or an older one of hf_domino's own.

        Takes `target`, `target_revision`, `license`, `acceptance`, `speed` and `results` for the card, see
        `hf_domino.hub.push_drafter`, beside transformers' arguments. Errors of the Hub are huggingface_hub's own.
        """
        if __name__.startswith("hf_domino."):
            # By name, as an import statement would make hub.py travel with every checkpoint.
            hub = importlib.import_module(".hub", __package__)
            return hub.push_drafter(self, repo_id, super().push_to_hub, **kwargs)
        return super().push_to_hub(repo_id, **kwargs)

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
        cos, sin = self.rotary_emb(hidden_states, position_ids)
        half = sin.shape[-1] // 2
        rotary = cos[:, None], torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)[:, None]
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
