"""Weights in super-blocks as NumPy arrays in the layout of ``trt_kvcache/kernels/super_block_layout.py``."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tests.kernels.packed_arrays import pack_rows, pack_values
from trt_kvcache.kernels.packed_layout import FRAGMENT_INPUTS, FRAGMENT_OUTPUTS, count_tiles
from trt_kvcache.kernels.super_block_layout import HIGH_BITS, LOW_NBYTES, fragment_nbytes

Array = npt.NDArray[Any]

OUTER = np.uint64(0x0001000100010001)


def pack_super_blocks(values: Array, kind: str) -> npt.NDArray[np.uint8]:
    """Return quantized values ``[outputs, inputs]`` (uint8) as bytes ``[tiles, fragments * bytes]``."""
    low = pack_values(values & np.uint8(15), "int4")
    if not HIGH_BITS[kind]:
        return low
    tiles, fragments = len(low), values.shape[1] // FRAGMENT_INPUTS
    high = np.zeros((tiles * FRAGMENT_OUTPUTS, values.shape[1]), np.uint8)
    np.right_shift(values, 4, out=high[: len(values)])
    words = _words(high.view("<u8").reshape(tiles, 2, 8, fragments, 2, 4), HIGH_BITS[kind])
    packed = np.empty((tiles, fragments, fragment_nbytes(kind)), np.uint8)
    packed[:, :, :LOW_NBYTES] = low.reshape(tiles, fragments, -1)
    packed[:, :, LOW_NBYTES:] = words.view(np.uint8).reshape(tiles, fragments, -1)
    return packed.reshape(tiles, -1)


def _words(of_lanes: Array, bits: int) -> npt.NDArray[np.uint32]:
    """Return the words ``[tiles, fragments, g, t, words]`` of other bits; ``of_lanes``: 8 values ``[tiles, i, g, fragments, half, t]``."""
    even, odd = (_together(of_lanes >> np.uint64(shift), bits) for shift in (0, 8))
    pairs = even | odd << np.uint32(16)
    tiles, _, g, fragments, _, t = of_lanes.shape
    words = np.zeros((tiles, fragments, g, t, bits), np.uint32)
    for i in range(2):
        for half in range(2):
            word, shift = divmod(4 * bits * (2 * i + half), 16)
            words[..., word] |= pairs[:, i, :, :, half].transpose(0, 2, 1, 3) << np.uint32(shift)
    return words


def _together(of_lanes: Array, bits: int) -> npt.NDArray[np.uint32]:
    """Return the lowest bits of bytes 0, 2, 4 and 6 beside each other."""
    apart = of_lanes & OUTER * np.uint64((1 << bits) - 1)
    step = 16 - bits
    joined = apart | apart >> np.uint64(step) | apart >> np.uint64(2 * step) | apart >> np.uint64(3 * step)
    found: npt.NDArray[np.uint32] = joined.astype(np.uint32) & np.uint32((1 << 4 * bits) - 1)
    return found


def pack_scales(scales: Array) -> npt.NDArray[np.uint8]:
    """Return two bytes for each half of each output, ``[outputs, inputs / 32, 2]``, as ``[tiles, fragments, 8, 8]``."""
    outputs, halves, _ = scales.shape
    of_tiles = pack_rows(np.ascontiguousarray(scales).view(np.uint16)[..., 0], halves)
    of_fragments = of_tiles.reshape(count_tiles(outputs), halves // 2, 2, 8, 2).transpose(0, 1, 3, 2, 4)
    return np.ascontiguousarray(of_fragments).view(np.uint8).reshape(count_tiles(outputs), halves // 2, 8, 8)


def pack_factors(factors: Array) -> npt.NDArray[np.float16]:
    """Return factors ``[outputs, super-blocks, count]`` as ``[tiles, super-blocks, 8, 2, count]``."""
    return np.stack([pack_rows(factors[..., index], factors.shape[1]) for index in range(factors.shape[2])], axis=-1)
