"""Watching what gets accepted."""

import threading
from contextlib import contextmanager
from contextvars import ContextVar

_own_tracker: ContextVar["Acceptance | None"] = ContextVar("hf_domino_acceptance", default=None)
_open_trackers: list["Acceptance"] = []


class Acceptance:
    """Acceptance lengths of the rounds seen by [`track_acceptance`].

    A round is one draft and its verification; the pass over the prompt is none. A pass that verifies nothing, because
    the room ended or the schedule drafted nothing, counts as a round that drafted 0 tokens and kept 1.

    Attributes:
        lengths (`list[int]`): Tokens kept in each round, the target's own (bonus) token included.
        drafted (`list[int]`): Tokens drafted in each round.
    """

    def __init__(self):
        self.lengths: list[int] = []
        self.drafted: list[int] = []
        self._lock = threading.Lock()

    def record(self, drafted: int, kept: int) -> None:
        with self._lock:
            self.drafted.append(drafted)
            self.lengths.append(kept)

    @property
    def mean(self) -> float:
        """The acceptance length tau: mean tokens kept a round. NaN before the first round."""
        return sum(self.lengths) / len(self.lengths) if self.lengths else float("nan")

    @property
    def histogram(self) -> dict[int, int]:
        """How many rounds kept 1, 2, 3, ... tokens."""
        return {length: self.lengths.count(length) for length in sorted(set(self.lengths))}


@contextmanager
def track_acceptance():
    """Collect the acceptance lengths of every `generate()` call with a drafter inside the block.

    A thread that opens its own tracker records there and nowhere else; calls in threads that have none (a `generate()`
    behind a streamer, say) are recorded by the trackers open elsewhere.

    Example:
        >>> with hf_domino.track_acceptance() as acceptance:
        ...     target.generate(**inputs, assistant_model=drafter)
        >>> acceptance.mean
    """
    tracker = Acceptance()
    token = _own_tracker.set(tracker)
    _open_trackers.append(tracker)
    try:
        yield tracker
    finally:
        _open_trackers.remove(tracker)
        _own_tracker.reset(token)


def record_round(drafted: int, kept: int) -> None:
    """Report a round to the trackers that listen to this thread."""
    own = _own_tracker.get()
    for tracker in [own] if own is not None else list(_open_trackers):
        tracker.record(drafted, kept)
