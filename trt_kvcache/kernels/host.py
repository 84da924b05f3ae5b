"""The kernels in NumPy, for host memory. Arguments were checked by the caller; ``stream`` has nothing to do here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trt_kvcache.memory import HostMemory
from trt_kvcache.tensor import DeviceTensor


def _array(tensor: DeviceTensor) -> np.ndarray[Any, Any]:
    memory = tensor.memory
    assert isinstance(memory, HostMemory)
    return memory.array(tensor)


def increment_scalar(lengths: DeviceTensor, increment: int, stream: Any) -> None:
    """Add one number to all lengths."""
    array = _array(lengths)
    array += np.int32(increment)


def increment_tensor(lengths: DeviceTensor, increments: DeviceTensor, stream: Any) -> None:
    """Add element by element."""
    array = _array(lengths)
    array += _array(increments)


def store_values(lengths: DeviceTensor, values: Sequence[int], accumulate: bool, stream: Any) -> None:
    """Store the values, or add them."""
    array = _array(lengths)
    if accumulate:
        array += np.asarray(values, np.int32)
    else:
        array[:] = values
