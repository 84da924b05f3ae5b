"""Reused arrays of the size of a vocabulary: allocating them costs as much as the computation in them."""

import threading
from typing import Any

import numpy as np


class Scratch(threading.local):
    """Arrays by name, separate for each thread."""

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray[Any, Any]] = {}

    def array(self, name: str, dtype: str, size: int) -> np.ndarray[Any, Any]:
        """Return an array of any content; the next call with this name, which has always one dtype, overwrites it."""
        array = self._arrays.get(name)
        if array is None or array.size < size:
            self._arrays[name] = array = np.empty(size, dtype)
        return array[:size]


scratch = Scratch()
