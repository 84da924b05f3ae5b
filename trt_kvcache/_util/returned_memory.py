"""Giving memory that is free in this process back to the system."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any


def return_memory() -> None:
    """Return to the system what the C library keeps for later, where it can (glibc)."""
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    try:
        return ctypes.CDLL("libc.so.6").malloc_trim
    except (OSError, AttributeError):  # another C library
        return None
