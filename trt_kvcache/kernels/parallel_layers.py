"""Large copies of many layers in several threads: one thread does not use the whole memory bandwidth."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

_Layer = TypeVar("_Layer")

# A smaller copy takes less time than starting threads.
_MIN_PARALLEL_NBYTES = 1 << 23


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="trt_kvcache")


if hasattr(os, "register_at_fork"):  # a forked process has none of the threads
    os.register_at_fork(after_in_child=_threads.cache_clear)


def for_each_layer(work: Callable[[_Layer], object], layers: Iterable[_Layer], nbytes: int) -> None:
    """Call ``work`` for each layer, perhaps in several threads. All calls have ended when this returns or raises."""
    if nbytes < _MIN_PARALLEL_NBYTES:
        for layer in layers:
            work(layer)
        return
    calls: list[Future[object]] = []
    try:
        for layer in layers:
            calls.append(_threads().submit(work, layer))
        wait(calls)
    finally:
        wait(calls)  # also the calls that had started when this was interrupted
    for call in calls:
        call.result()
