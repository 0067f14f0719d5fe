"""The walk: going through held-out answers as generation does, without generating anything.

At an anchor a block is drafted and compared with the answer; the next anchor stands behind the accepted drafts and one
token of the answer itself. Where the answers are the target's greedy ones, the lengths are those of `generate()`.
"""

import torch

from ..acceptance import Acceptance
from ..modeling_drafter import ContextCache
from .objective import draft_blocks


@torch.no_grad()
def walk(drafter, target, input_ids, loss_mask, features, use_head: bool = True) -> Acceptance:
    """Draft greedily through every answer of a batch.

    Args:
        drafter ([`DominoDrafter`] or [`Eagle3Drafter`]), target ([`Target`]): The pair.
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
    draft = _drafts_of(drafter, target, input_ids, features, use_head)
    while any(position is not None for position in positions):
        # Sequences that are through draft along, at a place where it doesn't matter.
        anchors = torch.tensor([position[0] if position else 0 for position in positions], device=input_ids.device)
        drafts = draft(anchors).to(input_ids.device)
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


def _drafts_of(drafter, target, input_ids, features, use_head):
    """What drafts for every sequence: anchors [B] -> [B, n]."""
    if drafter.config.method == "eagle3":
        drafts = _chains(drafter, target, input_ids, features)
        # The row in front of an anchor reads the anchor.
        return lambda anchors: drafts[torch.arange(len(anchors)), (anchors - 1).clamp(min=0)]
    context, unread = ContextCache(drafter.config.num_hidden_layers), [features]

    def choose(logits, drafted, columns):
        return logits.argmax(-1), logits

    def draft(anchors):
        tokens = input_ids.gather(1, anchors[:, None])
        new_features = unread.pop() if unread else None  # all of them, once
        hidden = draft_blocks(drafter, target, tokens, anchors[:, None], new_features, context)[:, 0]
        base_logits = target.base_logits(hidden).float()
        if not use_head or drafter.config.head == "none":
            return base_logits.argmax(-1)
        return drafter.roll_out(hidden, base_logits, target.embed(tokens[:, 0]), choose, target.embed)[0]

    return draft


def _chains(drafter, target, input_ids, features) -> torch.Tensor:
    """What is drafted behind each row of each sequence if the drafts before were right, [B, T, n].

    Only a chain's right drafts count, and up to its first wrong one it is this.
    """
    drafts = []
    for ids, rows in zip(input_ids.split(1), features.split(1)):  # one by one: logits are wide
        steps = drafter.unroll(target.embed(ids), rows, drafter.config.num_draft_tokens)
        picks = torch.stack([drafter.draft_logits(step).argmax(-1) for step in steps], dim=-1)
        drafts.append(picks if drafter.draft_vocabulary is None else drafter.draft_vocabulary[picks])
    return torch.cat(drafts)


def _answers(loss_mask: list) -> list[tuple[int, int]]:
    """First and last place of every run of at least two supervised tokens, the last run first."""
    edges = [i for i, (a, b) in enumerate(zip([0, *loss_mask], [*loss_mask, 0])) if bool(a) != bool(b)]
    return [(start, end - 1) for start, end in zip(edges[::2], edges[1::2]) if end - start > 1][::-1]


def _next_answer(answers):
    return answers.pop() if answers else None
