"""Work on the parts of a large array in threads: NumPy holds the GIL between its loops only."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")

#: Most threads: more of them wait for the GIL.
_MOST = 4


def for_each(function: Callable[[_T], object], parts: Iterable[_T]) -> None:
    """Call a function with each part, several at once; return after the last call. Raises the error of the first part that has one."""
    parts = list(parts)
    threads = min(len(parts), _MOST, count_processors())
    if threads <= 1:
        for part in parts:
            function(part)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="trt_kvcache arrays") as pool:
        for _ in pool.map(function, parts):
            pass


def count_processors() -> int:
    """Return the processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def row_slices(rows: int, columns: int, elements: int, *, multiple: int = 1) -> list[slice]:
    """Return slices of the rows of a matrix, of about so many elements each, and of a multiple of rows but for the last."""
    step = max(1, elements // max(columns, 1) // multiple) * multiple
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]
