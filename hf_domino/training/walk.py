"""The walk: going through held-out answers as generation does, without generating anything.

At an anchor a block is drafted and compared with the answer; the next anchor stands behind the accepted drafts and one
token of the answer itself. Where the answers are the target's greedy ones, the lengths are those of `generate()`.
"""

import torch

from ..acceptance import Acceptance
from ..modeling_domino import ContextCache
from .objective import draft_blocks


@torch.no_grad()
def walk(drafter, target, input_ids, loss_mask, features, use_head: bool = True) -> Acceptance:
    """Draft greedily through every answer of a batch.

    Args:
        drafter ([`DominoDrafter`]), target ([`Target`]): The pair.
        input_ids, loss_mask: [B, T]. Each run of supervised tokens is an answer; its first token is the first anchor,
            which generation has from the pass over the prompt.
        features: [B, T, F], the target's, see [`compute_features`].
        use_head: False leaves the head's correction out, which shows the base alone.

    Returns:
        The [`Acceptance`] of all rounds.
    """
    acceptance = Acceptance()
    count = drafter.config.num_draft_tokens
    answers = [_answers(row) for row in loss_mask.tolist()]
    positions = [_next_answer(row) for row in answers]
    context = ContextCache(drafter.config.num_hidden_layers)
    while any(position is not None for position in positions):
        # Sequences that are through draft along, at a place where it doesn't matter.
        anchors = torch.tensor([position[0] if position else 0 for position in positions], device=input_ids.device)
        drafts = _draft(drafter, target, input_ids, anchors, features, context, use_head).to(input_ids.device)
        features = None
        places = (anchors[:, None] + 1 + torch.arange(count, device=anchors.device)).clamp(max=input_ids.shape[1] - 1)
        matches = (drafts == input_ids.gather(1, places)).cumprod(-1).sum(-1).tolist()
        for row, position in enumerate(positions):
            if position is None:
                continue
            anchor, last = position
            # The last token of an answer is never drafted for: there is no room behind it.
            kept = min(matches[row] + 1, last - anchor)
            acceptance.record(min(count, last - anchor - 1), kept)
            positions[row] = (anchor + kept, last) if anchor + kept < last else _next_answer(answers[row])
    return acceptance


def _draft(drafter, target, input_ids, anchors, features, context, use_head) -> torch.Tensor:
    """One round for every sequence, [B, n]."""
    tokens = input_ids.gather(1, anchors[:, None])
    hidden = draft_blocks(drafter, target, tokens, anchors[:, None], features, context)[:, 0]
    base_logits = target.base_logits(hidden).float()
    if not use_head or drafter.config.head == "none":
        return base_logits.argmax(-1)

    def choose(logits, drafted, columns):
        return logits.argmax(-1), logits

    return drafter.roll_out(hidden, base_logits, target.embed(tokens[:, 0]), choose, target.embed)[0]


def _answers(loss_mask: list) -> list[tuple[int, int]]:
    """First and last place of every run of at least two supervised tokens, the last run first."""
    edges = [i for i, (a, b) in enumerate(zip([0, *loss_mask], [*loss_mask, 0])) if bool(a) != bool(b)]
    return [(start, end - 1) for start, end in zip(edges[::2], edges[1::2]) if end - start > 1][::-1]


def _next_answer(answers):
    return answers.pop() if answers else None
