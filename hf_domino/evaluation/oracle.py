"""An oracle in the drafter's place: it shows what generate() does with long accepted blocks.

A drafter that was not trained is never accepted, which hides most of what can go wrong and all of what can be gained.
"""

from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from ..generation_domino import DominoCandidateGenerator
from ..generation_eagle3 import Eagle3CandidateGenerator

GENERATORS = (DominoCandidateGenerator, Eagle3CandidateGenerator)


@contextmanager
def oracle(continuation: torch.Tensor, rate: float = 1.0, seed: int = 0):
    """Inside the block, drafts are the true continuation, each token spoilt with probability `1 - rate`.

    The round runs as it is, at its full cost; only then are the drafted tokens replaced. For one call at a time, in one
    thread. In sampling the replaced tokens are not what the handed-over logits say, so use it with greedy decoding.

    Args:
        continuation: [T], the token ids that plain decoding gives, without the prompt.
        rate: probability that a drafted token is right.
        seed: of the generator that spoils.
    """
    generator = torch.Generator().manual_seed(seed)
    prompt_lengths = {}

    def spoiling(draft):
        def spoilt(self, input_ids, count):
            tokens, logits = draft(self, input_ids, count)
            # The first draft follows the first new token, which the pass over the prompt gave.
            prompt_length = prompt_lengths.setdefault(id(self), input_ids.shape[1] - 1)
            done = input_ids.shape[1] - prompt_length
            truth = continuation[done : done + count].to(tokens.device)
            wrong = (torch.rand(len(truth), generator=generator) >= rate).to(tokens.device)
            tokens = tokens.clone()
            tokens[0, : len(truth)] = torch.where(wrong, (truth + 1) % self.config.vocab_size, truth)
            return tokens, logits

        return spoilt

    with ExitStack() as patches:
        for kind in GENERATORS:
            patches.enter_context(mock.patch.object(kind, "draft", spoiling(kind.draft)))
        yield
