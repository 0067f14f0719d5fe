"""Eagle3CandidateGenerator: one round of drafting with EAGLE-3 (paper, section 3.1)."""

import torch

from .generation_drafter import DraftGenerator
from .modeling_drafter import ContextCache


class Eagle3CandidateGenerator(DraftGenerator):
    """Drafts a chain of tokens: a pass over the newly verified rows gives the first, a pass over one row each other.

    Arguments and errors are those of [`DraftGenerator`], with an [`Eagle3Drafter`].
    """

    def __init__(self, drafter, target, generation_config, logits_processor=None):
        super().__init__(drafter, target, generation_config, logits_processor)
        self.context = ContextCache(num_layers=1)

    def context_rows(self, features, real, model_kwargs, input_ids) -> torch.Tensor:
        """Embeddings of the tokens one further on and features, side by side: [1, T, F] -> [1, T, H + F]."""
        count = features.shape[1]
        embeddings = self.target.embed(input_ids[:, -count - 1 : -1])
        if (unknown := count - embeddings.shape[1]) > 0:  # the prompt came as embeddings
            given = self.target.enter(model_kwargs["inputs_embeds"][:, -unknown:])
            embeddings = torch.cat([given.to(embeddings), embeddings], dim=1)
        anchor = self.target.embed(input_ids[:, -1:])
        following = torch.cat([embeddings[:, real], anchor], dim=1)[:, 1:]
        return torch.cat([following.to(features), features[:, real]], dim=-1)

    def draft(self, input_ids, count) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows, width = torch.cat(self.new_features, dim=1), self.config.hidden_size
        self.new_features = []
        hidden = self.backbone(rows[..., :width], self.drafter.project(rows[..., width:]))
        num_verified, prefix, self.chosen_from = self.context.length, input_ids, []
        for _ in range(count):
            if self.chosen_from:
                hidden = self.backbone(self.target.embed(prefix[:, -1:]), hidden)
            token, logits = self.choose(self.base_logits(hidden), prefix=prefix)
            self.chosen_from.append(logits)
            prefix = torch.cat([prefix, token[None].to(prefix.device)], dim=-1)
        # Rows made of the drafter's own outputs make room for those of the target's features.
        self.context.length = num_verified
        return prefix[:, -count:], torch.stack(self.chosen_from, dim=1) if self.returns_logits else None

    def backbone(self, embeddings, hidden_states) -> torch.Tensor:
        """A pass over rows [1, R, H], which join the context; returns the output of the last one, [1, 1, H]."""
        return self.drafter(embeddings, hidden_states, self.context)

    def base_logits(self, hidden) -> torch.Tensor:
        """The drafter's own head, [1, 1, H] -> [1, D] in float32 on the target's device, D the draft vocabulary."""
        return self.drafter.draft_logits(hidden)[:, -1].to(self.target.device, torch.float32)
