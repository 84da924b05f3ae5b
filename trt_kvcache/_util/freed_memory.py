"""Return of freed memory to the operating system."""

import ctypes
from collections.abc import Callable
from functools import cache


def return_freed_memory() -> None:
    """Return the pages of freed blocks to the operating system, if the C library keeps them (glibc: blocks of up to 32 MB).

    Builds need it: TensorRT dequantizes packed weights one by one, and freed blocks would add up to all of them.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    found: Callable[[int], int] = trim
    return found
