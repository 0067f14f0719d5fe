"""DominoCandidateGenerator: one round of drafting (paper, section 3)."""

import torch

from .generation_drafter import DraftGenerator
from .modeling_drafter import ContextCache


class DominoCandidateGenerator(DraftGenerator):
    """Drafts one block a round: one parallel pass of the backbone, then the head, slot by slot.

    Arguments and errors are those of [`DraftGenerator`], with a [`DominoDrafter`].
    """

    def __init__(self, drafter, target, generation_config, logits_processor=None):
        super().__init__(drafter, target, generation_config, logits_processor)
        self.num_candidates = getattr(
            generation_config, "num_correction_candidates", self.config.num_correction_candidates
        )
        self.weights = drafter.head_weights(self.target)
        # Of a draft vocabulary, only the rows of the output head and of the correction are read.
        self.head = self.target if self.vocabulary is None else self.target.restrict(drafter.draft_vocabulary)
        self.context = ContextCache(self.config.num_hidden_layers)

    def draft(self, input_ids, count) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One round: backbone, base logits, correction.

        Returns tokens [1, count], and where verification needs them the logits they were chosen from, [1, count, V].
        """
        block = input_ids.new_full((1, self.config.block_size), self.config.mask_token_id)
        block[:, 0] = input_ids[:, -1]
        embeddings = self.target.embed(block)
        # A compiled drafter has the same shapes in every round, the last one included.
        drafted = self.config.num_draft_tokens if self.drafter.is_compiled else count
        hidden = self.backbone(embeddings)[:, self.config.first_draft_slot :][:, :drafted]
        tokens, logits = self.correct(hidden, self.base_logits(hidden), embeddings[:, 0], input_ids)
        return tokens[:, :count], None if logits is None else logits[:, :count]

    def backbone(self, embeddings) -> torch.Tensor:
        """[1, L, H] -> [1, L, H]; the features observed since the last round join the context."""
        features = torch.cat(self.new_features, dim=1) if self.new_features else None
        self.new_features = []
        return self.drafter(embeddings, features, self.context)

    def base_logits(self, hidden) -> torch.Tensor:
        """The target's own head on the drafter's vectors, [1, n, H] -> [1, n, D] in float32, D the draft vocabulary."""
        return self.head.base_logits(hidden).float()

    def correct(self, hidden, base_logits, anchor_embedding, input_ids) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Choose the drafts one by one, each corrected by those before it."""
        if self.config.head == "none" and not self.logits_processor:
            tokens, logits = self.choose(base_logits[0])
            self.chosen_from = [logits]
            return tokens[None], logits[None]

        def choose(logits, drafted, columns):
            prefix = torch.cat([input_ids, drafted.to(input_ids.device)], dim=-1) if self.logits_processor else None
            return self.choose(logits, columns, prefix)

        tokens, self.chosen_from = self.drafter.roll_out(
            hidden, base_logits, anchor_embedding, choose, self.target.embed, self.num_candidates, self.weights
        )
        return tokens, torch.stack(self.chosen_from, dim=1) if self.returns_logits else None
