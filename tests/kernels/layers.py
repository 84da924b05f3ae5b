"""K/V layers full of random bytes, and what all their bytes should be: strides and padding are written out here once more."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from trt_kvcache import DeviceTensor, KVLayout
from trt_kvcache.dtypes import itemsize

LAYOUTS = pytest.mark.parametrize("layout", list(KVLayout), ids=lambda layout: layout.value)
GUARD = 256  # bytes before and after a layer, and a multiple of what K and V are padded to


@dataclass
class Layer:
    """One layer of a cache, and a copy of its allocation to be changed by the test."""

    tensor: DeviceTensor
    whole: DeviceTensor
    expected: Any  # all bytes, uint8
    slots: Any  # the same bytes as [B, 2, H, S, row bytes]


def make_layer(memory, stream, layout, shape, dtype, seed):
    """Return a layer of shape (B, H, S, D)."""
    b, h, s, d = shape
    row = d * itemsize(dtype)
    block = h * s * row  # K, or V, of one slot
    if layout is KVLayout.COMBINED:
        slot, kv, nbytes = 2 * block, block, b * 2 * block
    else:
        kv = -(-b * block // 256) * 256
        slot, nbytes = block, 2 * kv
    content = np.random.default_rng(seed).integers(0, 256, nbytes + 2 * GUARD, np.uint8)
    whole = memory.to_device(content, stream=stream)
    size = itemsize(dtype)
    tensor = DeviceTensor(
        whole.allocation, shape=(b, 2, h, s, d), dtype=dtype, strides=(slot // size, kv // size, s * d, d, 1), offset=GUARD
    )
    slots = np.ndarray((b, 2, h, s, row), np.uint8, content, GUARD, (slot, kv, s * row, row, 1))
    return Layer(tensor, whole, content, slots)


def check(layers):
    """Compare every byte of every allocation, padding and guards included."""
    for index, layer in enumerate(layers):
        different = np.flatnonzero(layer.whole.numpy() != layer.expected)
        assert different.size == 0, f"layer {index}: {different.size} bytes differ, the first at {different[0] - GUARD}"


def make_saved(memory, stream, shape, dtype, seed):
    """Return a saved tensor of shape (2, H, n, D), as a layer of one slot."""
    h, n, d = shape
    return make_layer(memory, stream, KVLayout.COMBINED, (1, h, n, d), dtype, seed)


def saved_tensor(saved):
    _, *shape = saved.tensor.shape
    return DeviceTensor(saved.whole.allocation, shape=shape, dtype=saved.tensor.dtype, offset=GUARD)
