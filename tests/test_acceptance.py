"""track_acceptance: what it counts, and for whom."""

import math
import threading

from hf_domino import track_acceptance
from hf_domino.acceptance import record_round

from .tiny import inputs, oracle, tiny_drafter, tiny_target


def test_lengths_mean_and_histogram():
    target = tiny_target()
    drafter = tiny_drafter(target)
    plain = target.generate(**inputs(), max_new_tokens=30, do_sample=False)
    with oracle(plain[0, 7:], 0.7), track_acceptance() as acceptance:
        target.generate(**inputs(), max_new_tokens=30, do_sample=False, assistant_model=drafter)
    # The first token comes from the pass over the prompt, which is no round.
    assert sum(acceptance.lengths) == 29
    assert acceptance.mean == 29 / len(acceptance.lengths) > 1
    assert sum(acceptance.histogram.values()) == len(acceptance.lengths) == len(acceptance.drafted)
    assert sum(length * count for length, count in acceptance.histogram.items()) == 29
    assert all(kept <= drafted + 1 for kept, drafted in zip(acceptance.lengths, acceptance.drafted))


def test_nothing_recorded():
    with track_acceptance() as acceptance:
        pass
    record_round(8, 3)
    assert acceptance.lengths == [] and math.isnan(acceptance.mean) and acceptance.histogram == {}


def test_the_innermost_tracker_of_a_thread_records():
    with track_acceptance() as outer:
        record_round(8, 1)
        with track_acceptance() as inner:
            record_round(8, 2)
        record_round(8, 3)
    assert (outer.lengths, inner.lengths) == ([1, 3], [2])


def test_a_thread_without_a_tracker_reports_to_those_open_elsewhere():
    def run(work):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    def own():
        with track_acceptance() as mine:
            record_round(8, 5)
        assert mine.lengths == [5]

    with track_acceptance() as acceptance:
        run(lambda: record_round(8, 4))
        run(own)
    assert acceptance.lengths == [4]
