"""``one_blas_thread``: small products of NumPy without BLAS threads.

BLAS divides even a product of a fraction of a millisecond among all cores, and then waits for the slowest thread. On a busy machine that
thread may wait for a core, so a prompt of a small model takes up to ten times as long as on one thread.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

from trt_kvcache._util.extras import naming_the_extra

#: Multiply-adds, or weight elements to read, from which a product takes one core long enough for threads to pay.
_MULTIPLY_ADDS = 2**24
_WEIGHT_ELEMENTS = 2**19


def one_blas_thread(rows: int, weight_elements: int) -> AbstractContextManager[Any]:
    """Return a context that limits BLAS to one thread if the largest product is small.

    The limit holds for the whole process; results depend on it in the order of sums only.
    """
    if weight_elements >= _WEIGHT_ELEMENTS or rows * weight_elements >= _MULTIPLY_ADDS:
        return nullcontext()
    blas = _blas()
    # A thread that finds another one's limit leaves it alone: it would restore that limit after the other has lifted it.
    if all(library.get_num_threads() == 1 for library in blas.lib_controllers):
        return nullcontext()
    limit: AbstractContextManager[Any] = blas.limit(limits=1)
    return limit


@cache
def _blas() -> Any:
    """Return the BLAS libraries of the process; cached, since the search takes 2 ms."""
    with naming_the_extra():
        from threadpoolctl import ThreadpoolController
    return ThreadpoolController().select(user_api="blas")
