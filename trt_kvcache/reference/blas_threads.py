"""``one_blas_thread``: small products of NumPy without threads of BLAS.

BLAS divides a product of a fraction of a millisecond among all cores and then waits for the slowest. On a busy machine that one waits
for its turn, so that a prompt of a small model takes ten times as long as on one thread.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

from trt_kvcache._util.extras import naming_the_extra

#: A product with as many multiply-adds, or as many elements of weights to read, takes one core long enough for threads to pay.
_MULTIPLY_ADDS = 2**24
_WEIGHT_ELEMENTS = 2**19


def one_blas_thread(rows: int, weight_elements: int) -> AbstractContextManager[Any]:
    """Return a context in which BLAS has one thread, or one that changes nothing."""
    if weight_elements >= _WEIGHT_ELEMENTS or rows * weight_elements >= _MULTIPLY_ADDS:
        return nullcontext()
    blas = _blas()
    # A thread that finds the limit of another one leaves it alone: it would restore that limit after the other has lifted it.
    if all(library.get_num_threads() == 1 for library in blas.lib_controllers):
        return nullcontext()
    limit: AbstractContextManager[Any] = blas.limit(limits=1)
    return limit


@cache
def _blas() -> Any:
    """Return the BLAS libraries of the process: looking through all libraries takes 2 ms."""
    with naming_the_extra():
        from threadpoolctl import ThreadpoolController
    return ThreadpoolController().select(user_api="blas")
