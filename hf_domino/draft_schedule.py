"""How much to draft: blocks cut where one more token no longer pays, and nothing drafted while drafting loses.

What pays is measured, not assumed: the target's passes and the drafting are timed as they run.
"""

import itertools
import operator
import statistics
import time
from collections import defaultdict, deque

import torch

# Share of its weight that a round keeps with every later one: about ten rounds count.
_MEMORY = 0.9
# Drafted rounds between two measurements of the undrafted pass: soon at first, seldom later.
_PLAIN_AFTER = (1, 8, 64)
# What a drafted token adds to the target's pass, of that pass, while little was measured: it counts as much as one
# measurement of four drafted tokens.
_ADDED, _ADDED_WEIGHT = 0.025, 16
# What drafting may lose, in undrafted passes: so many at first, this share of all time, and so many of those it won.
_FIRST_CREDIT, _ALLOWANCE, _MOST_CREDIT = 0.25, 0.0075, 4
# Weight of the drafts' own chances beside what was kept of them, in judging a round, so that its luck matters less; and
# what they may count for at most, in tokens, so that a round of which nothing was kept is always a loss.
_TRUST, _MOST_TRUST = 0.25, 0.15


class PassTimes:
    """Seconds from one draft to the next by the number of drafted tokens: the target's pass and the loop around it."""

    def __init__(self):
        self.seconds = defaultdict(lambda: deque(maxlen=16))

    def add(self, drafted: int, seconds: float) -> None:
        self.seconds[drafted].append(seconds)

    def line(self) -> tuple[float, float] | None:
        """Seconds of an undrafted pass, and what each drafted token adds; None until an undrafted pass was seen."""
        if 0 not in self.seconds:
            return None
        plain = statistics.median_low(self.seconds[0])
        # The undrafted pass is what everything is compared with: the line goes through it.
        points = [(n, statistics.median_low(times) - plain, len(times)) for n, times in self.seconds.items()]
        above = _ADDED_WEIGHT * _ADDED * plain + sum(w * n * more for n, more, w in points)
        return plain, max(0.0, above / (_ADDED_WEIGHT + sum(w * n * n for n, _, w in points)))


class DraftSchedule:
    """Decides in every round of one call whether to draft, and how many of the drafts to hand on.

    Draft j is handed on while its chance to survive, s_j, is worth the time that it adds to the target's pass:
    s_j > b * r, with b the seconds a drafted token adds and r the tokens a second that are reached. s_j is the product
    of the drafter's own probabilities up to j, scaled by how often such drafts were kept so far. It depends on the
    drafts' distributions and on earlier tokens, never on the j-th token itself: sampled output stays the target's.

    Whether to draft at all is a matter of credit, in undrafted passes: what a round saved over as many is added, what
    it lost is taken away, and a small share of all time is added. In debt, nothing is drafted. That keeps losses small,
    but is no bound: the first drafting, which reads the prompt, is not booked, drafts count a little for their own
    chances, times are noisy, and an answer of a few tokens ends before it has paid for the rounds that were tried.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock=time.perf_counter):
        self.clock, self.times = clock, PassTimes()
        self.predicted = self.accepted = 2.0
        self.kept = self.seconds = 0.0
        self.drafted: list[float] = []  # probabilities of the drafts handed on last
        self.drafting_seconds = None  # of the last round; None where it did not draft
        self.started = self.began = None
        self.rounds_since_plain, self.plain_after = 0, list(_PLAIN_AFTER)
        self.credit = _FIRST_CREDIT
        # Of rounds before an undrafted pass was seen: tokens, the seconds spent on them, and all seconds.
        self.unjudged: list[tuple[float, float, float]] = []

    def begin(self, num_matches: int) -> bool:
        """A round begins; of the drafts handed on last, `num_matches` were kept. Returns whether to draft."""
        self.began = self.clock()
        if self.started is not None:
            self._learn(num_matches, self.began - self.started)
        if self.credit < 0:
            return False
        if self.rounds_since_plain < self.plain_after[0]:
            return True
        self.plain_after = self.plain_after[1:] or self.plain_after
        return False

    def cut(self, confidence: list[float]) -> int:
        """How many of the drafts to hand on, given the largest probability of each draft's distribution."""
        worth = _ADDED
        if (line := self.times.line()) is not None:
            plain, added = line
            worth = added * max(1 / plain, self.kept / self.seconds if self.seconds else 0.0)
        return sum(survival > worth for survival in self._survival(confidence))

    def end(self, confidence: list[float] | None) -> None:
        """Drafts of these probabilities are handed on, and the target's pass begins; None: nothing was drafted."""
        self.started = self.clock()
        self.drafted = confidence or []
        self.drafting_seconds = None if confidence is None else self.started - self.began

    def _survival(self, confidence):
        """Each draft's chance that it and all before it are kept."""
        scale = self.accepted / self.predicted
        return itertools.accumulate((min(1.0, own * scale) for own in confidence), operator.mul)

    def _learn(self, num_matches, seconds):
        self.times.add(len(self.drafted), seconds)
        self.rounds_since_plain = self.rounds_since_plain + 1 if self.drafted else 0
        tokens = spent = 0.0
        if self.drafting_seconds is not None:
            if self.seconds:  # the first drafting also reads the prompt, once for all
                seconds += self.drafting_seconds
            expected = sum(self._survival(self.drafted))
            tokens = 1 + (1 - _TRUST) * num_matches + min(_TRUST * expected, _MOST_TRUST)
            spent = seconds
            # What stands behind the first miss was not judged by the target.
            self.predicted = _MEMORY * self.predicted + sum(self.drafted[: num_matches + 1])
            self.accepted = _MEMORY * self.accepted + num_matches
            self.kept = _MEMORY * self.kept + num_matches + 1
            self.seconds = _MEMORY * self.seconds + seconds
        self.unjudged.append((tokens, spent, seconds))
        if (line := self.times.line()) is not None:
            for tokens, spent, seconds in self.unjudged:
                won = tokens - (spent - _ALLOWANCE * seconds) / line[0]
                self.credit = min(self.credit + won, _MOST_CREDIT)
            self.unjudged = []


def largest_probabilities(logits: list[torch.Tensor]) -> list[float]:
    """Of each draft's distribution, given the logits [1, K] that it was chosen from."""
    return torch.cat([(row.amax(-1) - row.logsumexp(-1)).exp() for row in logits]).tolist()
