"""How much to draft: blocks cut where one more token no longer pays, and nothing drafted while drafting loses.

What pays is measured, not assumed: the target's passes and the drafting are timed as they run.
"""

import statistics
import time
from collections import defaultdict, deque

import torch

# Share of its weight that a round keeps with every later one: about ten rounds count.
_MEMORY = 0.9
# Drafted rounds before a verdict: at the start, and after a pause.
_FIRST_TRIAL, _NEXT_TRIAL = 4, 2
# Undrafted tokens after a verdict against drafting, doubled with each further one.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 8, 64
# Drafted rounds between two measurements of the undrafted pass: soon at first, seldom later.
_PLAIN_AFTER = (1, 8, 64)


class PassTimes:
    """Seconds from one draft to the next by the number of drafted tokens: the target's pass and the loop around it."""

    def __init__(self):
        self.seconds = defaultdict(lambda: deque(maxlen=16))

    def add(self, drafted: int, seconds: float) -> None:
        self.seconds[drafted].append(seconds)

    def line(self) -> tuple[float, float] | None:
        """Seconds of an undrafted pass, and what each drafted token adds; None until both can be told."""
        if 0 not in self.seconds or len(self.seconds) < 2:
            return None
        plain = statistics.median(self.seconds[0])
        # The undrafted pass is what everything is compared with: the line goes through it.
        points = [(n, statistics.median(times) - plain, len(times)) for n, times in self.seconds.items()]
        slope = sum(w * n * more for n, more, w in points) / sum(w * n * n for n, _, w in points)
        return plain, max(0.0, slope)


class DraftSchedule:
    """Decides in every round of one call whether to draft, and how many of the drafts to hand on.

    Draft j is handed on while its chance to survive, s_j, is worth the time that it adds to the target's pass:
    s_j > b * r, with b the seconds a drafted token adds and r the tokens a second that are reached. s_j is the product
    of the drafter's own probabilities up to j, scaled by how often such drafts were kept so far. It depends on the
    drafts' distributions and on earlier tokens, never on the j-th token itself: sampled output stays the target's.

    Where the last rounds gave fewer tokens a second than undrafted passes do, nothing is drafted for a while.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock=time.perf_counter):
        self.clock, self.times = clock, PassTimes()
        self.predicted = self.accepted = 2.0
        self.drafted: list[float] = []  # probabilities of the drafts handed on last
        self.drafting_seconds = None  # of the last round; None where it did not draft
        self.started = self.began = None
        self.pause, self.undrafted_left = _SHORTEST_PAUSE, 0
        self.rounds_since_plain, self.plain_after = 0, list(_PLAIN_AFTER)
        self._start_trial(_FIRST_TRIAL)

    def begin(self, num_matches: int) -> bool:
        """A round begins; of the drafts handed on last, `num_matches` were kept. Returns whether to draft."""
        self.began = self.clock()
        if self.started is not None:
            self._learn(num_matches, self.began - self.started)
        if self.undrafted_left > 0:
            self.undrafted_left -= 1
            return False
        if self.rounds_since_plain < self.plain_after[0]:
            return True
        self.plain_after = self.plain_after[1:] or self.plain_after
        return False

    def cut(self, confidence: list[float]) -> int:
        """How many of the drafts to hand on, given the largest probability of each draft's distribution."""
        line, count = self.times.line(), len(confidence)
        if line is not None:
            plain, added = line
            rate = max(1 / plain, self.kept / self.seconds if self.seconds else 0.0)
            scale, survival, count = self.accepted / self.predicted, 1.0, 0
            for own in confidence:
                survival *= min(1.0, own * scale)
                if survival <= added * rate:
                    break
                count += 1
        return count

    def end(self, confidence: list[float] | None) -> None:
        """Drafts of these probabilities are handed on, and the target's pass begins; None: nothing was drafted."""
        self.started = self.clock()
        self.drafted = confidence or []
        self.drafting_seconds = None if confidence is None else self.started - self.began

    def _learn(self, num_matches, seconds):
        self.times.add(len(self.drafted), seconds)
        self.rounds_since_plain = self.rounds_since_plain + 1 if self.drafted else 0
        if self.drafting_seconds is None:
            return
        # What stands behind the first miss was not judged by the target.
        self.predicted = _MEMORY * self.predicted + sum(self.drafted[: num_matches + 1])
        self.accepted = _MEMORY * self.accepted + num_matches
        self.kept = _MEMORY * self.kept + num_matches + 1
        self.seconds = _MEMORY * self.seconds + self.drafting_seconds + seconds
        self.rounds += 1
        if self.rounds > _FIRST_TRIAL:
            self.pause = _SHORTEST_PAUSE
        line = self.times.line()
        if self.rounds >= self.trial and line is not None and self.kept * line[0] < self.seconds:
            self.undrafted_left = self.pause
            self.pause = min(2 * self.pause, _LONGEST_PAUSE)
            self._start_trial(_NEXT_TRIAL)

    def _start_trial(self, rounds):
        self.trial, self.rounds, self.kept, self.seconds = rounds, 0, 0.0, 0.0


def largest_probabilities(logits: list[torch.Tensor]) -> list[float]:
    """Of each draft's distribution, given the logits [1, K] that it was chosen from."""
    return torch.cat([(row.amax(-1) - row.logsumexp(-1)).exp() for row in logits]).tolist()
