"""The Domino head (paper, section 3): base logits plus a low-rank correction from a GRU's causal state.

    logits_j = base_j + W2 SiLU(W1 [z_j ; s_j]),  s_j = GRU(anchor, d_0 .. d_{j-1}) from a zero state in every block.

Shapes: B batch, n drafted tokens, H drafter width, V vocabulary, D draft vocabulary, S causal state.
"""

import weakref
from typing import NamedTuple

import torch
from torch.nn.functional import embedding, linear, silu


class HeadWeights(NamedTuple):
    """What a rollout reads of the head.

    Args:
        input: [3S, H], the GRU's W_ih.
        recurrent: [3S, S], the GRU's W_hh.
        from_hidden: [rank, H], the part of W1 that reads the backbone's vectors.
        from_state: [rank, S], its part that reads the GRU's state.
        output: [V, rank], W2, or [D, rank], its rows for the draft vocabulary.
        inputs: [D, 3S], W_ih on the embedding of each token of the draft vocabulary; None: taken token by token.
        rows: [V], the row of each token in `inputs`; 0 for tokens outside.
    """

    input: torch.Tensor
    recurrent: torch.Tensor
    from_hidden: torch.Tensor
    from_state: torch.Tensor
    output: torch.Tensor
    inputs: torch.Tensor | None = None
    rows: torch.Tensor | None = None

    def bytes_read(self, num_drafts: int, num_corrected: int, num_candidates: int | None = None) -> int:
        """Bytes of these weights that a rollout reads, each time it reads them. Arguments: drafts, those of them that
        are corrected, and the tokens of a slot that are."""
        of_inputs = self.input.nbytes if self.inputs is None else self.inputs[0].nbytes
        output = self.output[:num_candidates].nbytes
        of_a_draft, of_a_correction = self.recurrent.nbytes + of_inputs, self.from_state.nbytes + output
        of_the_block = self.from_hidden.nbytes + self.input.nbytes - of_inputs  # the anchor is no draft
        return of_the_block + num_drafts * of_a_draft + num_corrected * of_a_correction


# Of each drafter, what was prepared last for its draft vocabulary.
_prepared = weakref.WeakKeyDictionary()


class DominoHead:
    """The head as a mixin over the modules `prefix_gru` and `embed_proj`.

    They stand at the top of the drafter as in the public checkpoints. Both forms below take n drafting slots; with
    `head="none"` they return the base logits.
    """

    def correction_features(self, hidden: torch.Tensor, token_embeddings: torch.Tensor) -> torch.Tensor:
        """SiLU(W1 [z_j ; s_j]) with the states of given tokens (teacher forcing); `embed_proj[2]` maps it to V.

        Args:
            hidden: [B, n, H], the backbone's vectors z of the drafting slots.
            token_embeddings: [B, n, H], embeddings of the anchor and of the first n - 1 drafted tokens.

        Returns:
            [B, n, rank].
        """
        states, _ = self.prefix_gru(token_embeddings.to(self.dtype))
        return self.embed_proj[1](self.embed_proj[0](torch.cat([hidden, states], dim=-1)))

    def teacher_forced(self, hidden, base_logits, token_embeddings) -> torch.Tensor:
        """Logits [B, n, V] in float32 of a whole block, given its tokens. Arguments as in `correction_features`."""
        logits = base_logits.float()
        uncorrected = self.config.num_uncorrected_tokens
        if self.config.head == "none" or uncorrected >= hidden.shape[1]:
            return logits
        features = self.correction_features(hidden, token_embeddings)[:, uncorrected:]
        corrected = logits[:, uncorrected:] + self.embed_proj[2](features).to(logits)
        return torch.cat([logits[:, :uncorrected], corrected], dim=1)

    def head_weights(self, target=None) -> HeadWeights | None:
        """The head's weights for rollouts with a target's embeddings; None with `head="none"`.

        For a draft vocabulary they are prepared once, and again when weights or vocabulary have changed: its rows of W2
        and, where they take no more bytes than the drafter itself, the GRU's input projections of its tokens. A slot
        then reads one row of 3S numbers in place of an embedding and W_ih. On a CPU what is prepared is float32, in
        which products with a single row cost less than in bfloat16.

        Args:
            target ([`Target`]): needed where a draft vocabulary is to be prepared.
        """
        if self.config.head == "none":
            return None
        gru, first, output = self.prefix_gru, self.embed_proj[0].weight, self.embed_proj[2].weight
        width = self.config.hidden_size
        weights = HeadWeights(
            gru.weight_ih_l0, gru.weight_hh_l0, first[:, :width], first[:, width:].contiguous(), output
        )
        vocabulary = self.draft_vocabulary
        if vocabulary is None or target is None:
            return weights
        sources = [*weights[:3], output, getattr(target.embeddings, "weight", output)]
        state = [(w.data_ptr(), None if w.is_inference() else w._version, w.dtype) for w in sources]
        embeddings, old_state, old_vocabulary, prepared = _prepared.get(self, (lambda: None, None, None, None))
        is_same = embeddings() is target.embeddings and state == old_state and not vocabulary.is_meta
        if is_same and torch.equal(vocabulary, old_vocabulary):
            return prepared
        with torch.no_grad():
            prepared = self._prepare(weights, vocabulary, target)
        _prepared[self] = weakref.ref(target.embeddings), state, vocabulary.clone(), prepared
        return prepared

    def _prepare(self, weights, vocabulary, target) -> HeadWeights:
        weights = weights._replace(output=weights.output[vocabulary])
        dtype = torch.promote_types(self.dtype, torch.float32) if self.device.type == "cpu" else self.dtype
        size = len(vocabulary) * weights.input.shape[0] * dtype.itemsize
        if size > sum(w.numel() * w.element_size() for w in self.parameters()):
            return weights
        rows = vocabulary.new_zeros(self.config.vocab_size)
        rows[vocabulary] = torch.arange(len(vocabulary), device=vocabulary.device)
        inputs = linear(target.embed(vocabulary).to(weights.input), weights.input)
        names = ("recurrent", "from_state", "output")
        return weights._replace(
            inputs=inputs.to(dtype), rows=rows, **{name: getattr(weights, name).to(dtype) for name in names}
        )

    def roll_out(
        self, hidden, base_logits, anchor_embedding, choose, embed, num_candidates=None, weights=None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Draft token by token. Nothing here waits for the device.

        Args:
            hidden: [B, n, H].
            base_logits: [B, n, V] in float32.
            anchor_embedding: [B, H].
            choose: maps (logits [B, K], tokens so far [B, j], columns [B, K]) to (token [B], logits it was chosen
                from). `columns` says which columns of the base logits these are; None: all of them, K = V.
            embed: maps token ids [B] to embeddings [B, H].
            num_candidates: K, correct only so many of a slot's largest base logits and choose among them. The matrix
                W2, as wide as the vocabulary, is then not read for every slot. Default: correct and offer all.
            weights: of [`head_weights`]; needed where the base logits are those of the draft vocabulary only.

        Returns:
            Drafted tokens [B, n] and a list of n logits, what `choose` chose each from.
        """
        weights = self.head_weights() if weights is None else weights
        return self.run_slots(hidden, base_logits, anchor_embedding, choose, embed, num_candidates, weights)

    def run_slots(self, hidden, base_logits, anchor_embedding, choose, embed, num_candidates, weights):
        """The arithmetic of `roll_out`, which [`DominoDrafter.compile`] compiles."""
        batch, count = hidden.shape[:2]
        tokens = torch.empty(batch, count, dtype=torch.long, device=base_logits.device)
        chosen_from, shortlist = [], None
        if weights is not None:
            if num_candidates is not None and num_candidates < base_logits.shape[-1]:
                best, shortlist = base_logits.topk(num_candidates, dim=-1)
                best_output = weights.output[shortlist.to(weights.output.device)]
            # W1 [z ; s] = W1_z z + W1_s s, and the first part is taken for all slots at once.
            from_hidden = linear(hidden, weights.from_hidden).to(weights.from_state.dtype)
            state = from_hidden.new_zeros(batch, self.config.causal_state_size)
            read = linear(anchor_embedding.to(hidden), weights.input).to(state.dtype)
        for j in range(count):
            logits, columns = base_logits[:, j], None
            if weights is not None:
                state = gru_step(read, linear(state, weights.recurrent), state)
                if j >= self.config.num_uncorrected_tokens:
                    features = silu(from_hidden[:, j] + linear(state, weights.from_state))
                    if shortlist is not None:
                        logits, columns = best[:, j], shortlist[:, j]
                        correction = (best_output[:, j] @ features[..., None])[..., 0]
                    else:
                        correction = linear(features, weights.output)
                    logits = logits + correction.to(logits)
            tokens[:, j], logits = choose(logits, tokens[:, :j], columns)
            chosen_from.append(logits)
            if weights is not None and j + 1 < count:
                token = tokens[:, j]
                if weights.inputs is None:
                    read = linear(embed(token).to(hidden), weights.input)
                else:
                    read = embedding(weights.rows[token.to(weights.rows.device)], weights.inputs)
        return tokens, chosen_from


def gru_step(read: torch.Tensor, recurrent: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """The next state of torch's GRU without biases, from W_ih x [B, 3S], W_hh s [B, 3S] and s [B, S]."""
    size = state.shape[-1]
    reset, update = (read[:, : 2 * size] + recurrent[:, : 2 * size]).sigmoid().chunk(2, dim=-1)
    new = (read[:, 2 * size :] + reset * recurrent[:, 2 * size :]).tanh()
    return new + update * (state - new)
