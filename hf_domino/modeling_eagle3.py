"""Eagle3Drafter: the one decoder layer of EAGLE-3 with its own output head, in one PreTrainedModel.

A row of the drafter stands for a token t of the text: it reads the embedding of token t + 1 and the target's features
g_t of token t, and predicts token t + 2.

    both = [input_layernorm(embedding_{t+1}) ; hidden_norm(g_t)]
    x    = g_t + attention(both)
    a_t  = x + mlp(post_attention_layernorm(x))
    logits of token t + 2 = lm_head(norm(a_t))

Where the target has not been yet, the drafter's own a_{t-1} takes the place of g_t.

Shapes: B batch, R new rows, F concatenated features, H drafter width, V vocabulary, D draft vocabulary.
Source: EAGLE-3, arXiv 2503.01840, section 3. Tensor names are those of the public checkpoints.
"""

import logging
import re

import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding

from .checkpoints import check_draft_vocabulary
from .checkpoints_eagle3 import LAYOUT
from .configuration_eagle3 import Eagle3Config
from .modeling_drafter import ContextCache, Drafter, DrafterAttention, additive, rotation

logger = logging.getLogger(__name__)


class Eagle3DecoderLayer(nn.Module):
    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = DrafterAttention(config, layer_idx=0, input_size=2 * config.hidden_size)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, embeddings, hidden_states, rotary, context=None, count=1, attention_mask=None):
        """[B, R, H], [B, R, H] -> [B, count, H], the last rows."""
        normed = self.hidden_norm(hidden_states)
        both = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        residual = (normed if self.norm_before_residual else hidden_states)[:, -count:]
        # The rows before are only looked at: their keys and values are all that is needed of them.
        attended = self.self_attn(both[:, -count:], both[:, :-count], rotary, attention_mask, context, 0)
        hidden_states = residual + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Eagle3Drafter(Drafter):
    """An EAGLE-3 drafter for assisted generation: `target.generate(..., assistant_model=drafter)`.

    Token embeddings are the target's, the output head is its own, over the draft vocabulary. It drafts a chain of
    tokens: transformers' loop verifies one sequence, so the paper's dynamic tree of drafts has no place in it.

    It is loaded from what hf_domino saved, or from a public EAGLE-3 checkpoint as published: those of the authors,
    SpecForge, AngelSlim and speculators, in safetensors. A copy of the target's embeddings that a file may hold is not
    read; whether the target's own are of the right size is checked when it drafts.
    """

    config_class = Eagle3Config
    layout = LAYOUT
    main_input_name = "embeddings"
    _no_split_modules = ["Eagle3DecoderLayer"]
    _keys_to_ignore_on_load_unexpected = [rf"^{re.escape(name)}" for name in LAYOUT.may_be_unused]

    def __init__(self, config: Eagle3Config):
        super().__init__(config)
        self.fc = nn.Linear(config.num_features, config.hidden_size, bias=False)
        self.midlayer = Eagle3DecoderLayer(config)
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        size = config.draft_vocabulary_size
        self.lm_head = nn.Linear(config.hidden_size, size or config.vocab_size, bias=False)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        # Row i of the head is token i + d2t[i], and t2d says of every token whether the head has a row for it.
        self.register_buffer("d2t", None if size is None else torch.zeros(size, dtype=torch.long))
        self.register_buffer("t2d", None if size is None else torch.arange(config.vocab_size) < size)
        self.post_init()

    @property
    def draft_vocabulary(self) -> torch.Tensor | None:
        """The token of every row of the output head, [D]; None where there is one for each token."""
        return None if self.d2t is None else self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @classmethod
    def from_target(cls, target, draft_vocabulary=None, **overrides) -> "Eagle3Drafter":
        """A new drafter for a target, in float32, whose output head and the norm in front of it start as the target's.

        They start at random, which is said, where the target's head is no plain linear layer of the drafter's width.

        Args:
            target: a decoder model.
            draft_vocabulary: [D], the token ids that it is to draft. Default: all.
            overrides: fields of [`Eagle3Config`] to set.

        Raises:
            ValueError: `draft_vocabulary` holds no distinct token ids, or a field is out of range.
        """
        if draft_vocabulary is not None:
            draft_vocabulary = torch.as_tensor(draft_vocabulary).sort().values
            overrides["draft_vocabulary_size"] = len(draft_vocabulary)
        config = cls.config_class.for_target(target.config, **overrides)
        drafter = cls(config)
        if drafter.d2t is not None:
            check_draft_vocabulary(draft_vocabulary, config.vocab_size)
            drafter.d2t.copy_(draft_vocabulary - torch.arange(len(draft_vocabulary)))
            drafter.t2d.zero_()[draft_vocabulary] = True
        head, norm = target.get_output_embeddings(), getattr(target.get_decoder(), "norm", None)
        shape = config.vocab_size, config.hidden_size
        if type(head) is nn.Linear and head.weight.shape == shape and not head.weight.is_meta and norm is not None:
            rows = slice(None) if drafter.d2t is None else draft_vocabulary
            with torch.no_grad():
                drafter.lm_head.weight.copy_(head.weight[rows])
                drafter.norm.weight.copy_(norm.weight)
        else:
            logger.warning(
                f"The output head of {type(target).__name__} can't be copied: the drafter's starts at random."
            )
        return drafter

    def candidate_generator(self, target, generation_config, logits_processor=None):
        from .generation_eagle3 import Eagle3CandidateGenerator

        return Eagle3CandidateGenerator(self, target, generation_config, logits_processor)

    def project(self, features: torch.Tensor) -> torch.Tensor:
        """Features of the target, [B, R, F] -> [B, R, H], the g of every row."""
        return self.fc(features.to(self.device, self.dtype))

    def forward(
        self, embeddings: torch.Tensor, hidden_states: torch.Tensor, context: ContextCache | None = None
    ) -> torch.Tensor:
        """Read new rows.

        Args:
            embeddings: [B, R, H], target embeddings of the tokens one further on.
            hidden_states: [B, R, H], their g, or the drafter's own output for the row before.
            context: keys and values of the rows before; the new ones join it.

        Returns:
            [B, 1, H], the a of the last row. No other row's is ever used, as there is one layer.
        """
        hidden_states = hidden_states.to(self.device, self.dtype)
        past, count = context.length if context is not None else 0, hidden_states.shape[1]
        if context is not None:
            heads, width = self.config.num_key_value_heads, self.config.head_dim
            context.reserve(count, (2, len(hidden_states), heads, 0, width), hidden_states)
        positions = torch.arange(past, past + count, device=hidden_states.device)[None]
        rotary = rotation(self.rotary_emb, hidden_states, positions)
        hidden_states = self.midlayer(embeddings.to(hidden_states), hidden_states, rotary, context)
        if context is not None:
            context.length = past + count
        return hidden_states

    def unroll(self, embeddings: torch.Tensor, features: torch.Tensor, num_steps: int) -> list[torch.Tensor]:
        """Every row of whole texts, and what would be drafted behind it if each draft were the text's own token.

        In step 0 a row reads its features, in step k the token k further on and its own output of step k - 1; it sees
        the rows of step 0 up to its own place and its own of the steps between, as a chain of drafts does. This is the
        training-time test of EAGLE-3 (section 3.2).

        Args:
            embeddings: [B, T, H], of the texts' tokens. Rows that reach past the end read the last ones.
            features: [B, T, F].
            num_steps: how many drafts.

        Returns:
            [B, T, H] for each step, the a of every row.
        """
        length = embeddings.shape[1]
        places = torch.arange(length, device=self.device)
        seen, own = places <= places[:, None], places == places[:, None]
        read, hidden, positions, masks = [], [self.project(features)], [], []
        for step in range(num_steps):
            read.append(embeddings[:, (places + step + 1).clamp(max=length - 1)].to(hidden[0]))
            positions.append(places + step)
            masks.append(own if step else seen)
            rotary = rotation(self.rotary_emb, hidden[0], torch.cat(positions)[None])
            mask = additive(torch.cat(masks, dim=-1), hidden[0].dtype)
            rows = torch.cat(read, dim=1), torch.cat(hidden, dim=1)
            hidden.append(self.midlayer(*rows, rotary, count=length, attention_mask=mask))
        return hidden[1:]

    def draft_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits of the token behind each row, [..., H] -> [..., D]."""
        return self.lm_head(self.norm(hidden_states))


Eagle3Config.register_for_auto_class()
Eagle3Drafter.register_for_auto_class("AutoModel")

if not __name__.startswith("hf_domino."):
    # Loaded from a checkpoint folder as remote code: no package import has connected generate().
    from .assisted_generation import connect

    connect()
