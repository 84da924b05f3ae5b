"""Packed weights as NumPy arrays in the layout of ``trt_kvcache/kernels/packed_layout.py``."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.kernels.linear_tiles import PACKED_BITS
from trt_kvcache.kernels.packed_layout import FRAGMENT_INPUTS, FRAGMENT_NBYTES, FRAGMENT_OUTPUTS, count_tiles

Array = npt.NDArray[Any]


def pack_values(values: Array, kind: str) -> npt.NDArray[np.uint8]:
    """Return quantized values ``[outputs, inputs]`` (int4: 0 to 15; int8; bits of floats) as bytes ``[tiles, fragments * bytes]``."""
    outputs, inputs = values.shape
    tiles, fragments = count_tiles(outputs), -(-inputs // FRAGMENT_INPUTS)
    whole = np.zeros((tiles * FRAGMENT_OUTPUTS, fragments * FRAGMENT_INPUTS), np.uint8)
    whole[:outputs, :inputs] = np.ascontiguousarray(values).view(np.uint8)
    if PACKED_BITS[kind] == 8:
        stored = whole.reshape(tiles, 2, 8, fragments, 2, 4, 8).transpose(0, 3, 4, 2, 5, 1, 6)
    else:
        split = whole.reshape(tiles, 2, 8, fragments, 2, 4, 2, 2, 2)
        stored = (split[..., 0, :] | split[..., 1, :] << np.uint8(4)).transpose(0, 3, 2, 5, 1, 4, 7, 6)
    return np.ascontiguousarray(stored).reshape(tiles, fragments * FRAGMENT_NBYTES[kind])


def in_tiles(of_rows: Array, groups: int) -> Array:
    """Return scales or zero points ``[outputs, groups]`` as ``[tiles, groups, 8, 2]``; ``groups``: with those of padding."""
    tiles = count_tiles(len(of_rows))
    whole = np.zeros((tiles * FRAGMENT_OUTPUTS, groups), of_rows.dtype)
    whole[: len(of_rows), : of_rows.shape[1]] = of_rows
    in_tiles: Array = whole.reshape(tiles, 2, FRAGMENT_OUTPUTS // 2, groups).transpose(0, 3, 2, 1)
    return in_tiles
