"""What a drafter is trained on: random anchors, one block behind each, and Domino's base-anchored loss on the blocks.

Sources: Domino, arXiv 2605.29707, section 4; anchors and position weights: DFlash, arXiv 2602.06036, appendix A.1.
Shapes: B sequences of T tokens, A anchors, L slots of a block, n drafted tokens, H width, V vocabulary, c rows a chunk.
"""

import hashlib
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from ..modeling_domino import visible

# Entries of the dense attention mask (of the scores, for "eager") that one pass of the backbone may need.
_MASK_ENTRIES = 2**26
_FLEX_BLOCK = 128


def base_loss_weight(step: int, total_steps: int | None, start: float = 1.0, share: float = 1.0) -> float:
    """The curriculum's lambda: falls from `start` to 0 over the first `share` of the run.

    lambda = start * (1 - step / (total_steps * share)), clamped to [0, 1]. With `share=0` it is 0 from the first step.

    Raises:
        ValueError: the length of the run is unknown, or an argument is out of range.
    """
    if not 0 <= start <= 1 or share < 0:
        raise ValueError(f"lambda_start must be from 0 to 1 and lambda_share at least 0, but are {start} and {share}.")
    if share == 0:
        return 0.0
    if not total_steps or total_steps < 0:
        raise ValueError(f"lambda falls over the run, so its number of steps must be known, but is {total_steps}.")
    return min(1.0, max(0.0, start * (1 - step / (total_steps * share))))


def default_decay(block_size: int) -> float:
    """Gamma of the position weights exp(-j / gamma): on the line through the published 4 (block 8) and 7 (block 16)."""
    return 1 + 3 * block_size / 8


# ---- anchors and blocks


def draw_anchors(loss_mask, record_ids, num_anchors: int, seed: int, epoch: int) -> torch.Tensor:
    """Random anchors where the token and its successor are supervised, without replacement.

    Each sequence has a generator of its own, seeded by (seed, epoch, record), so that neither the batching nor a
    resumed run changes what is drawn.

    Args:
        loss_mask: [B, T].
        record_ids: [B], what tells the sequences apart.

    Returns:
        [B, A] on the CPU, sorted and padded with -1. A is at most `num_anchors` and at least 1.
    """
    rows = []
    for mask, record in zip(loss_mask.bool().cpu(), record_ids.tolist()):
        candidates = (mask[:-1] & mask[1:]).nonzero()[:, 0]
        key = hashlib.sha256(f"{seed}/{epoch}/{record}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
        chosen = torch.randperm(len(candidates), generator=generator)[:num_anchors]
        rows.append(candidates[chosen].sort().values)
    longest = max(1, *map(len, rows))
    return torch.stack([F.pad(row, (0, longest - len(row)), value=-1) for row in rows])


def drafts_to_learn(loss_mask, anchors, count: int) -> torch.Tensor:
    """Which of the `count` tokens behind each anchor [B, A] are learned, [B, A, count]: the supervised ones up to the
    first that is not, since generation never drafts past the end of an answer."""
    places = anchors[..., None] + torch.arange(1, count + 1, device=anchors.device)
    supervised = at_places(loss_mask.bool(), places) & (places < loss_mask.shape[1])
    return supervised.cumprod(-1).bool() & (anchors >= 0)[..., None]


def at_places(values, places) -> torch.Tensor:
    """values [B, T, ...] at places [B, A] or [B, A, n], clamped into the sequence -> [B, A, ...] or [B, A, n, ...]."""
    rows = torch.arange(len(values), device=values.device).view(-1, *[1] * (places.dim() - 1))
    return values[rows, places.clamp(0, values.shape[1] - 1)]


def block_masks(config, places, context_length: int, dtype: torch.dtype) -> dict:
    """Attention masks of blocks that stand at `places` [B, A], for each layer type as the attention backend takes them.

    Queries are the A * L slots; keys are the context and the slots. Additive [B, 1, A * L, T + A * L], or a BlockMask.
    """
    batch, num_blocks = places.shape
    slots = torch.arange(config.block_size, device=places.device)
    query_position = (places[..., None] + slots).flatten(1)
    query_block = places[..., None].expand(-1, -1, config.block_size).flatten(1)
    context = torch.arange(context_length, device=places.device).expand(batch, -1)
    key_position = torch.cat([context, query_position], dim=1)
    key_block = torch.cat([torch.full_like(context, -1), query_block], dim=1)
    make = _flex_mask if config._attn_implementation == "flex_attention" else _additive_mask
    tables = query_position, key_position, query_block, key_block
    return {layer_type: make(config, layer_type, *tables, dtype) for layer_type in set(config.layer_types)}


def _additive_mask(config, layer_type, query_position, key_position, query_block, key_block, dtype):
    query, key = (slice(None), slice(None), None), (slice(None), None)
    seen = visible(config, layer_type, query_position[query], key_position[key], query_block[query], key_block[key])
    return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)[:, None]


def _flex_mask(config, layer_type, query_position, key_position, query_block, key_block, dtype):
    from torch.nn.attention.flex_attention import create_block_mask

    def table(values, fill):
        # The kernel asks about whole tiles: rows and columns behind the end exist, and see and are seen by nothing.
        return F.pad(values, (0, -values.shape[1] % _FLEX_BLOCK), value=fill)

    (batch, num_queries), num_keys = query_position.shape, key_position.shape[1]
    query_position, query_block = table(query_position, 0), table(query_block, -2)
    key_position, key_block = table(key_position, 2**30), table(key_block, -3)

    def sees(b, h, q, k):
        return visible(config, layer_type, query_position[b, q], key_position[b, k], query_block[b, q], key_block[b, k])

    return create_block_mask(sees, batch, None, num_queries, num_keys, device=query_position.device)


def draft_blocks(drafter, target, anchor_tokens, places, features, context=None) -> torch.Tensor:
    """Hidden vectors of the drafting slots of blocks that can't see each other.

    Args:
        anchor_tokens: [B, A].
        places: [B, A], positions of the anchors; a block sees the context strictly before its own.
        features: [B, T, F], or None where the [`ContextCache`] `context` holds those of the whole sequences already.

    Returns:
        [B, A, n, H].
    """
    config = drafter.config
    past = context.length if context is not None else 0
    length = past + (features.shape[1] if features is not None else 0)
    passes = []
    per_pass = _blocks_per_pass(config, *places.shape, length)
    for tokens, at in zip(anchor_tokens.split(per_pass, dim=1), places.split(per_pass, dim=1)):
        block = torch.full((*at.shape, config.block_size), config.mask_token_id, device=tokens.device)
        block[..., 0] = tokens
        slots = torch.arange(config.block_size, device=at.device)
        new = torch.arange(past, length, device=at.device).expand(len(at), -1)
        hidden = drafter(
            target.embed(block).flatten(1, 2),
            features,
            context,
            position_ids=torch.cat([new, (at[..., None] + slots).flatten(1)], dim=1),
            attention_mask=block_masks(config, at, length, drafter.dtype),
        )
        passes.append(hidden.view(*block.shape, -1)[:, :, config.first_draft_slot :])
    return torch.cat(passes, dim=1)


def _blocks_per_pass(config, batch, num_blocks, context_length):
    copies = config.num_attention_heads if config._attn_implementation == "eager" else 1
    count = num_blocks
    while count > 1:
        slots = count * config.block_size
        if batch * copies * slots * (context_length + slots) <= _MASK_ENTRIES:
            break
        count = (count + 1) // 2
    return count


# ---- the loss


class DraftingObjective(nn.Module):
    """L = (1 - lambda) L_final + lambda L_base over the drafts behind every anchor, with teacher-forced causal states.

    Both losses are sums over drafts of exp(-j / decay) * [(1 - soft_target_weight) * CE(token)
    + soft_target_weight * CE(target's distribution) + total_variation_weight * TV(target's distribution)] for the j-th
    draft of a block, divided by the sum of these weights over the whole optimiser step: however the step is cut into
    batches, the gradient is the same. With `head="none"` the two losses are one.

    Args:
        drafter ([`DominoDrafter`]): What is trained, the only parameters of this module.
        target ([`Target`]): Frozen.
        decay (`float`, *optional*): Default: [`default_decay`].
        soft_target_weight, total_variation_weight (`float`): Both need the target's last hidden states.
        loss_vocabulary (`torch.Tensor`, *optional*): Token ids. The softmax then runs over these rows of the output
            head only, and drafts of other tokens are not learned; much cheaper on a CPU.
        chunk_size (`int`): Drafts whose logits, [chunk_size, V] in float32, are in memory at once.
    """

    accepts_loss_kwargs = True  # Trainer: the loss is normalised over the whole step already

    def __init__(
        self,
        drafter,
        target,
        decay: float | None = None,
        soft_target_weight: float = 0.0,
        total_variation_weight: float = 0.0,
        loss_vocabulary: torch.Tensor | None = None,
        chunk_size: int = 128,
    ):
        super().__init__()
        decay = self.default_decay(drafter.config) if decay is None else decay
        if not (0 <= soft_target_weight <= 1 and total_variation_weight >= 0 and decay > 0):
            raise ValueError(
                "soft_target_weight must be from 0 to 1, total_variation_weight at least 0 and decay above 0, but they "
                f"are {soft_target_weight}, {total_variation_weight} and {decay}."
            )
        self.drafter = drafter
        self.target = target
        self.soft_target_weight = soft_target_weight
        self.total_variation_weight = total_variation_weight
        self.chunk_size = chunk_size
        self.decay = decay
        self.loss_vocabulary, self.loss_rows, self.loss_target = None, None, target
        if loss_vocabulary is not None:
            self.loss_vocabulary = loss_vocabulary.unique().to(drafter.device)
            self.loss_rows = torch.full((drafter.config.vocab_size,), -1, device=drafter.device)
            self.loss_rows[self.loss_vocabulary] = torch.arange(len(self.loss_vocabulary), device=drafter.device)
            self.loss_target = target.restrict(self.loss_vocabulary)
        self._no_split_modules = drafter._no_split_modules

    @staticmethod
    def default_decay(config) -> float:
        """Of the published position weights exp(-j / decay)."""
        return default_decay(config.block_size)

    @property
    def num_drafts(self) -> int:
        """Drafts behind an anchor that are learned."""
        return self.drafter.config.num_draft_tokens

    @property
    def needs_last_hidden(self) -> bool:
        return bool(self.soft_target_weight or self.total_variation_weight)

    def gradient_checkpointing_enable(self, **kwargs):
        # Its name is another one in newer transformers.
        enable = getattr(self.drafter, "activation_checkpointing_enable", self.drafter.gradient_checkpointing_enable)
        enable(**kwargs)

    activation_checkpointing_enable = gradient_checkpointing_enable

    def draft_weights(self, input_ids, loss_mask, anchors) -> torch.Tensor:
        """Weight of every draft behind every anchor, [B, A, n]; 0 where nothing is to be learned."""
        steps = torch.arange(self.num_drafts, device=anchors.device)
        learned = drafts_to_learn(loss_mask, anchors, self.num_drafts)
        if self.loss_rows is not None:
            labels = at_places(input_ids, anchors[..., None] + 1 + steps)
            learned = learned & (self.loss_rows.to(labels.device)[labels] >= 0)
        return learned * torch.exp(-steps / self.decay)

    def forward(self, input_ids, loss_mask, anchors, features, base_weight, normalizer=None, last_hidden=None):
        """Loss of a batch, and sums to report it by.

        Args:
            input_ids, loss_mask: [B, T], padded on the right.
            anchors: [B, A], padded with -1, see [`draw_anchors`].
            features: [B, T, F], the target's, see [`compute_features`].
            base_weight: lambda.
            normalizer: sum of `draft_weights` over the optimiser step. Default: over this batch.
            last_hidden: [B, T, H], the target's final-normed states, where `needs_last_hidden`.

        Returns:
            The loss, and a dict of sums for [`summarize`].
        """
        # Blocks that only fill up the batch stand behind the sequence, where no other block is.
        places = torch.where(anchors < 0, input_ids.shape[1], anchors)
        steps = places[..., None] + torch.arange(self.num_drafts + 1, device=places.device)
        tokens = at_places(input_ids, steps)
        weights = self.draft_weights(input_ids, loss_mask, anchors)
        chosen = weights > 0
        labels = tokens[..., 1:][chosen]
        if self.loss_rows is not None:
            labels = self.loss_rows.to(labels.device)[labels]
        teacher = at_places(last_hidden, steps[..., :-1])[chosen] if self.needs_last_hidden else None
        by_row, shared = self._draft(input_ids, features, places, tokens)

        loss_of = partial(self._loss_of, labels, weights[chosen], teacher, base_weight)
        total, report = _InChunks.apply(
            loss_of, self.chunk_size, torch.is_grad_enabled(), len(by_row), *(rows[chosen] for rows in by_row), *shared
        )
        if normalizer is None:
            normalizer = weights.sum()
        loss = total / torch.as_tensor(normalizer, device=total.device).clamp(min=1e-9)
        num_drafts = drafts_to_learn(loss_mask, anchors, self.num_drafts).sum((0, 1))
        return loss, _sums(anchors, weights, report) | {"drafts": num_drafts}

    def _draft(self, input_ids, features, places, tokens) -> tuple[list, list]:
        """What `_logits` makes the logits of every draft from: tensors [B, A, n, ...], and others that all share.

        Arguments: [B, T]; [B, T, F]; anchors [B, A]; their own tokens and those of the drafts behind, [B, A, n + 1].
        """
        config = self.drafter.config
        hidden = draft_blocks(self.drafter, self.target, tokens[..., 0], places, features)
        if config.head == "none":
            return [hidden], []
        embeddings = self.target.embed(tokens[..., :-1]).to(hidden.device)
        states = self.drafter.correction_features(hidden.flatten(0, 1), embeddings.flatten(0, 1))
        corrected = torch.arange(self.num_drafts, device=states.device) >= config.num_uncorrected_tokens
        states = (states * corrected[:, None]).view(*hidden.shape[:-1], -1)
        weight = self.drafter.embed_proj[2].weight
        return [hidden, states], [weight if self.loss_vocabulary is None else weight[self.loss_vocabulary]]

    def _logits(self, hidden, states=None, weight=None) -> list[torch.Tensor]:
        """Logits of some drafts in float32, [c, V]: the base's and, where there is a head, the corrected ones."""
        base = self.loss_target.base_logits(hidden).float().to(hidden.device)
        return [base] if states is None else [base, base + F.linear(states, weight).to(base)]

    def _loss_of(self, labels, weights, teacher, base_weight, rows, *drafts):
        """Summed loss of some rows, and [2, 3, c]: base and final; loss, hit and distance to the target of each row."""
        labels, weights = labels[rows], weights[rows]
        goal = None if teacher is None else self.loss_target.base_logits(teacher[rows]).float().softmax(-1)
        goal = None if goal is None else goal.to(weights.device)
        reports = [self._draft_loss(logits, labels, goal) for logits in self._logits(*drafts)]
        report = torch.stack([reports[0], reports[-1]])
        base_loss, final_loss = report[:, 0]
        return (weights * ((1 - base_weight) * final_loss + base_weight * base_loss)).sum(), report.detach()

    def _draft_loss(self, logits, labels, goal) -> torch.Tensor:
        """Loss of each row of logits [c, V], whether its largest is the label, and total variation: [3, c]."""
        hit = (logits.argmax(-1) == labels).float()
        if goal is None:
            return torch.stack([F.cross_entropy(logits, labels, reduction="none"), hit, torch.zeros_like(hit)])
        log_q = logits.log_softmax(-1)
        hard, soft = F.nll_loss(log_q, labels, reduction="none"), -(goal * log_q).sum(-1)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.total_variation_weight > 0):
            distance = (goal - log_q.exp()).abs().sum(-1) / 2
        mixed = (1 - self.soft_target_weight) * hard + self.soft_target_weight * soft
        return torch.stack([mixed + self.total_variation_weight * distance, hit, distance])


def _sums(anchors, weights, report) -> dict[str, torch.Tensor]:
    """What [`summarize`] needs, so that the sums of batches and processes can be added up; [2] is base and final."""
    chosen, is_anchor = weights > 0, anchors >= 0
    hits = report.new_zeros(2, *chosen.shape)
    hits[:, chosen] = report[:, 1]
    # A block is kept up to its first miss, and the target's own token comes on top.
    accepted = hits.cumprod(-1).sum(-1) + 1
    return {
        "weight": weights.sum(),
        "loss": (report[:, 0] * weights[chosen]).sum(-1),
        "distance": report[:, 2].sum(-1),
        "rows": chosen.sum(),
        "hits": hits.sum((1, 2)),
        "accepted": (accepted * is_anchor).sum((1, 2)),
        "anchors": is_anchor.sum(),
        "skipped": (~is_anchor.any(1)).sum(),
    }


def summarize(sums: dict[str, torch.Tensor], by_slot: bool = False) -> dict[str, float]:
    """Readable means of the (added up) sums that [`DraftingObjective`] returns.

    `base_` is the drafter without its head's correction. `acceptance_at_anchors` overstates what generation gives,
    whose anchors are where a draft failed: [`walk`] measures that.
    """
    drafts = sums["drafts"].sum().clamp(min=1)
    means = {
        "skipped_sequences": sums["skipped"].item(),
        "outside_vocabulary": (1 - sums["rows"] / drafts).item(),
    }
    for i, (loss, prefix) in enumerate((("base_loss", "base_"), ("final_loss", ""))):
        means[loss] = (sums["loss"][i] / sums["weight"].clamp(min=1e-9)).item()
        means[f"{prefix}accuracy"] = (sums["hits"][i].sum() / drafts).item()
        means[f"{prefix}acceptance_at_anchors"] = (sums["accepted"][i] / sums["anchors"].clamp(min=1)).item()
        if sums["distance"].any():
            means[f"{prefix}total_variation"] = (sums["distance"][i] / sums["rows"].clamp(min=1)).item()
        if by_slot:
            accuracy = sums["hits"][i] / sums["drafts"].clamp(min=1)
            means |= {f"{prefix}accuracy_{j}": value for j, value in enumerate(accuracy.tolist(), start=1)}
    return means


class _InChunks(torch.autograd.Function):
    """Sum a loss over chunks of rows; the gradient is taken chunk by chunk on the way, so that one chunk's logits are
    all that is ever in memory, and nothing is computed twice.

    `loss_of(rows, hidden[rows], ..., weight)` returns the loss of the rows and a report [2, 3, c] on them. Of the
    tensors, the first `num_by_row` have those rows; the others are shared by all chunks.
    """

    @staticmethod
    def forward(ctx, loss_of, chunk_size, with_grad, num_by_row, *inputs):
        hidden = inputs[0]
        gradients = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in inputs] if with_grad else []
        shared = [tensor.detach().requires_grad_(with_grad) for tensor in inputs[num_by_row:]]
        total, reports = torch.zeros((), device=hidden.device), [torch.zeros(2, 3, 0, device=hidden.device)]
        for start in range(0, len(hidden), chunk_size):
            rows = slice(start, start + chunk_size)
            with torch.set_grad_enabled(with_grad):
                chunk = [tensor[rows].detach().requires_grad_(with_grad) for tensor in inputs[:num_by_row]] + shared
                loss, report = loss_of(rows, *chunk)
            total += loss.detach().to(total)
            reports.append(report.to(total))
            for i, gradient in enumerate(torch.autograd.grad(loss, chunk) if with_grad else ()):
                (gradients[i][rows] if i < num_by_row else gradients[i]).add_(gradient)
        ctx.save_for_backward(*(gradient.to(tensor.dtype) for gradient, tensor in zip(gradients, inputs)))
        report = torch.cat(reports, dim=-1)
        ctx.mark_non_differentiable(report)
        return total, report

    @staticmethod
    def backward(ctx, grad_total, _):
        return None, None, None, None, *(grad_total * gradient for gradient in ctx.saved_tensors)
