"""What every kind of drafter is made of: its memory of the context, its attention, and a model that loads and saves.

Shapes: B batch, C context tokens, L new rows, H drafter width.
"""

import importlib
import inspect
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, eager_attention_forward

from .checkpoints import load_drafter
from .configuration_drafter import DrafterConfig


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


def additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The mask [1, 1, L, keys] that attention adds, from what is seen, [L, keys]."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)[None, None]


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of [B, heads, T, head_dim]; `sin` is negative in the first half of head_dim."""
    return states * cos + states.roll(states.shape[-1] // 2, dims=-1) * sin


def rotation(rotary_emb, like: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What [`rotate`] takes for positions [B, T]: cos and sin, [B, 1, T, head_dim] each, in the dtype of `like`."""
    cos, sin = rotary_emb(like, position_ids)
    half = sin.shape[-1] // 2
    return cos[:, None], torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)[:, None]


class DrafterAttention(nn.Module):
    """Attention of new rows over the context and themselves; all pass through this layer's own key and value weights.

    `input_size` is the width of what it reads (default: hidden_size).
    """

    def __init__(self, config: DrafterConfig, layer_idx: int, input_size: int | None = None):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.is_causal = False
        width, bias = input_size or config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, config.num_attention_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=bias)
        norm = Qwen3RMSNorm if config.use_qk_norm else lambda *args, **kwargs: nn.Identity()
        self.q_norm = norm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = norm(config.head_dim, eps=config.rms_norm_eps)

    def forward(self, hidden_states, context_states, rotary, attention_mask, context, first):
        """hidden_states [B, L, input_size], context_states [B, C, input_size] -> [B, L, H]."""
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


class Drafter(PreTrainedModel):
    """A model that drafts in `target.generate(..., assistant_model=drafter)`.

    A kind of drafter says how its files look (`layout`, a [`Layout`]) and drafts through the generator that
    `candidate_generator` returns. It keeps no state between calls: one drafter serves any number of calls and threads.
    """

    base_model_prefix = ""
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def candidate_generator(self, target, generation_config, logits_processor=None):
        """The [`DraftGenerator`] of one `generate()` call; arguments and errors are those of its constructor."""
        raise NotImplementedError

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, config=None, **kwargs):
        """Load a drafter of this kind: one saved by hf_domino, or a public checkpoint as published.

        Takes what `PreTrainedModel.from_pretrained` takes. Only safetensors are read.

        Raises:
            ValueError: the folder is no drafter, or its configuration or weights don't fit one; the message says how.
        """
        return load_drafter(cls, super().from_pretrained, pretrained_model_name_or_path, config, model_args, kwargs)

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
