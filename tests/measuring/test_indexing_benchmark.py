"""What `benchmarks.index.watching` counts of a run: the steady part without reading ahead, and the steps."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from itertools import pairwise

import pytest
from benchmarks.index.watching import STEPS, Spans, WatchedLock, steady_window


def test_batches_read_ahead_are_no_part_of_the_steady_rate() -> None:
    # The encoder is ready after 10 s; five batches of 32 wait for it, then each takes a second.
    marks = [(10.0 + 0.01 * number, 32 * (number + 1)) for number in range(5)]
    marks += [(11.0 + number, 32 * (number + 6)) for number in range(10)]
    window = steady_window(marks, 5)
    assert window is not None
    start, end, photos = window
    assert photos / (end - start) == pytest.approx(32, rel=0.01)
    assert (start, end, photos) == (pytest.approx(10.04), 20.0, 320)
    assert steady_window(marks[:5], 5) is None and steady_window([], 5) is None  # all were read ahead


def test_steps_are_counted_inside_the_window_alone() -> None:
    spans = Spans()
    spans.all += [("decoding", 0.0, 4.0), ("decoding", 9.0, 20.0), ("embedding", 4.0, 8.0), ("waiting", 4.0, 5.0)]
    spans.all += [("held", 5.0, 7.0), ("levels", 6.5, 7.0), ("writing", 3.0, 3.25)]
    found = spans.steps(2.0, 10.0)
    want = {"decoding": 3.0, "waiting": 1.0, "encoding": 1.5, "levels": 0.5, "packing": 1.0, "writing": 0.25}
    assert {name: found[name] for name in STEPS} == pytest.approx(want)


def test_a_lock_is_held_by_one_at_a_time_and_the_others_wait() -> None:
    spans = Spans()
    lock = WatchedLock(threading.Lock(), spans)

    def work() -> None:
        with lock:
            time.sleep(0.03)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held = sorted((start, end) for name, start, end in spans.all if name == "held")
    assert len(held) == 3 and all(left[1] <= right[0] for left, right in pairwise(held))
    waited = spans.seconds("waiting", held[0][0], held[-1][1])
    assert waited > 0.03 and spans.seconds("held", held[0][0], held[-1][1]) >= 0.09
    with pytest.raises(KeyError), WatchedLock(nullcontext(), spans):
        raise KeyError  # an error passes
