"""What an EAGLE-3 drafter is trained on: chains of drafts, each made from the drafter's own output for the one before.

Source: EAGLE-3, arXiv 2503.01840, section 3.2 (training-time test) and the authors' training code.
Shapes: B sequences of T tokens, A anchors, n steps, H width, D draft vocabulary, c rows a chunk.
"""

import math

import torch
import torch.nn.functional as F

from .objective import DraftingObjective, at_places

# The authors unroll so many steps and weigh each 0.8 times the one before.
_NUM_STEPS = 7
_STEP_WEIGHT = 0.8


class Eagle3Objective(DraftingObjective):
    """[`DraftingObjective`] for an [`Eagle3Drafter`]: the loss of the drafts behind every anchor, step by step.

    The softmax runs over the drafter's own vocabulary, that of the target too, and drafts of other tokens are not
    learned. The published loss is that to the target's distribution alone, `soft_target_weight=1`. At least 7 steps are
    unrolled, however many the drafter drafts.

    Args:
        drafter ([`Eagle3Drafter`]), target ([`Target`]): The pair.
        decay (`float`, *optional*): Default: weights of 0.8 to the power of the step.
        options: the others of [`DraftingObjective`].

    Raises:
        ValueError: a `loss_vocabulary` is given, or an option is out of range.
    """

    def __init__(self, drafter, target, decay: float | None = None, loss_vocabulary=None, **options):
        if loss_vocabulary is not None:
            raise ValueError("An EAGLE-3 drafter learns the tokens of its own head: set draft_vocabulary_size instead.")
        super().__init__(drafter, target, decay, loss_vocabulary=drafter.draft_vocabulary, **options)

    @staticmethod
    def default_decay(config) -> float:
        return -1 / math.log(_STEP_WEIGHT)

    @property
    def num_drafts(self) -> int:
        return max(_NUM_STEPS, self.drafter.config.num_draft_tokens)

    def draft_weights(self, input_ids, loss_mask, anchors):
        # No row stands in front of a text's first token.
        return super().draft_weights(input_ids, loss_mask, anchors) * (anchors > 0)[..., None]

    def _draft(self, input_ids, features, places, tokens):
        steps = self.drafter.unroll(self.target.embed(input_ids), features, self.num_drafts)
        # The row in front of an anchor reads the anchor, and drafts what follows.
        hidden = [at_places(step, places - 1) for step in steps]
        return [self.drafter.norm(torch.stack(hidden, dim=2))], [self.drafter.lm_head.weight]

    def _logits(self, hidden, weight):
        return [F.linear(hidden, weight).float()]
