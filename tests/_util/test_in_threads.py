"""Loops over the parts of an array in threads: every part once, the first error, and no thread where there is one processor."""

import threading

import numpy as np
import pytest

from trt_kvcache._util import in_threads
from trt_kvcache._util.in_threads import for_each, row_slices


@pytest.mark.parametrize("processors", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 100])
def test_every_part_once(monkeypatch, processors, count):
    monkeypatch.setattr(in_threads, "count_processors", lambda: processors)
    calls = np.zeros(count, int)
    names = set()

    def call(index):
        calls[index] += 1
        names.add(threading.current_thread().name)

    for_each(call, range(count))
    assert (calls == 1).all()
    assert (names == {threading.main_thread().name}) == (count > 0 and (processors == 1 or count == 1))


def test_parts_run_at_once(monkeypatch):
    monkeypatch.setattr(in_threads, "count_processors", lambda: 2)
    both = threading.Barrier(2, timeout=30)
    for_each(lambda part: both.wait(), range(2))


@pytest.mark.parametrize("processors", [1, 3])
def test_the_first_error_is_raised_after_the_calls_that_run(monkeypatch, processors):
    monkeypatch.setattr(in_threads, "count_processors", lambda: processors)
    running = set()

    def call(part):
        running.add(part)
        if part in (2, 5):
            raise ValueError(part)
        running.discard(part)

    with pytest.raises(ValueError, match=r"^2$"):
        for_each(call, range(8))
    assert running <= {2, 5}


@pytest.mark.parametrize(
    ("rows", "columns", "elements", "multiple"), [(10, 4, 8, 1), (33, 64, 1000, 16), (5, 100, 7, 1), (3, 0, 5, 1), (0, 4, 8, 1)]
)
def test_slices_cover_all_rows(rows, columns, elements, multiple):
    slices = row_slices(rows, columns, elements, multiple=multiple)
    assert [row for one in slices for row in range(rows)[one]] == list(range(rows))
    assert all(one.start % multiple == 0 for one in slices)
    assert all((one.stop - one.start) * columns <= max(elements, multiple * columns) for one in slices)
