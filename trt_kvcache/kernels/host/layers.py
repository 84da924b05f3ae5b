"""Large copies of many layers at once: one thread alone does not fill the memory's bandwidth."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

_Layer = TypeVar("_Layer")

# What is smaller is done before threads have begun.
_LEAST_NBYTES = 1 << 23


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="trt_kvcache")


def for_each_layer(work: Callable[[_Layer], object], layers: Iterable[_Layer], nbytes: int) -> None:
    """Call ``work`` for each layer, which must touch nothing of another. All are done when this returns or raises."""
    if nbytes < _LEAST_NBYTES:
        for layer in layers:
            work(layer)
        return
    calls = [_threads().submit(work, layer) for layer in layers]
    try:
        wait(calls)
    finally:
        wait(calls)  # again, if the first was interrupted
    for call in calls:
        call.result()
