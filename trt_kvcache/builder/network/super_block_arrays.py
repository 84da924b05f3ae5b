"""Weights in super-blocks as NumPy arrays in the layout of ``trt_kvcache/kernels/super_block_layout.py``."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache._util.in_threads import for_each, row_slices
from trt_kvcache.builder.network.packed_arrays import in_tiles, pack_values
from trt_kvcache.checkpoint.quantized.super_blocks import SuperBlocks, factors_of, read_scales, read_values
from trt_kvcache.kernels.packed_layout import FRAGMENT_INPUTS, FRAGMENT_OUTPUTS, HALF_INPUTS, count_tiles
from trt_kvcache.kernels.super_block_layout import HIGH_BITS, LARGEST, LOW_NBYTES, SUPER_BLOCK, fragment_nbytes, high_bit_places

Array = npt.NDArray[Any]

#: Weights that are unpacked at once.
_ELEMENTS = 1 << 22


def super_block_arrays(stored: SuperBlocks, largest: float) -> dict[str, Array] | None:
    """Return values, scales and factors of a matrix; None if a weight may be larger than ``largest``, or is no number."""
    kind, (outputs, inputs), blocks = stored.kind.lower(), stored.shape, stored.blocks()
    factors = np.ascontiguousarray(factors_of(blocks, stored.kind)).view(np.float16)
    with np.errstate(invalid="ignore"):
        bounds = np.abs(factors.astype(np.float64)) @ np.array(LARGEST[kind], np.float64)
    if not bounds.max() <= largest:
        return None
    scales = np.empty((outputs, inputs // HALF_INPUTS, 2), np.uint8)
    read_scales(blocks, stored.kind, scales)
    packed = np.empty((count_tiles(outputs), inputs // FRAGMENT_INPUTS * fragment_nbytes(kind)), np.uint8)

    def pack(rows: slice) -> None:
        values = np.empty((rows.stop - rows.start, inputs), np.uint8)
        read_values(blocks[rows], stored.kind, values)
        packed[rows.start // FRAGMENT_OUTPUTS : count_tiles(rows.stop)] = _pack_values(values, kind)

    for_each(pack, row_slices(outputs, inputs, _ELEMENTS, multiple=FRAGMENT_OUTPUTS))
    of_factors = [in_tiles(factors[..., index], inputs // SUPER_BLOCK) for index in range(factors.shape[2])]
    return {"values": packed, "scales": _pack_scales(scales), "factors": np.stack(of_factors, axis=-1)}


def _pack_values(values: npt.NDArray[np.uint8], kind: str) -> npt.NDArray[np.uint8]:
    """Return quantized values ``[outputs, inputs]`` as bytes ``[tiles, fragments * bytes]``."""
    low, bits = pack_values(values & np.uint8(15), "int4"), HIGH_BITS[kind]
    if not bits:
        return low
    tiles, fragments = len(low), values.shape[1] // FRAGMENT_INPUTS
    whole = np.zeros((tiles * FRAGMENT_OUTPUTS, values.shape[1]), np.uint8)
    np.right_shift(values, 4, out=whole[: len(values)])
    high = whole.reshape(tiles, 2, 8, fragments, 2, 4, 4, 2).transpose(0, 3, 2, 5, 1, 4, 6, 7)
    words = np.zeros((tiles, fragments, 8, 4, bits), np.uint32)
    places = zip(*(one.ravel().tolist() for one in high_bit_places(bits)), strict=True)
    for (word, shift), index in zip(places, np.ndindex(2, 2, 4, 2), strict=True):
        row, half, pair, odd = index
        words[..., word] |= high[..., row, half, pair, odd].astype(np.uint32) << np.uint32(shift)
    packed = np.empty((tiles, fragments, fragment_nbytes(kind)), np.uint8)
    packed[:, :, :LOW_NBYTES] = low.reshape(tiles, fragments, -1)
    packed[:, :, LOW_NBYTES:] = words.view(np.uint8).reshape(tiles, fragments, -1)
    return packed.reshape(tiles, -1)


def _pack_scales(scales: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return two bytes for each half of each output, ``[outputs, inputs / 32, 2]``, as ``[tiles, fragments, 8, 8]``."""
    halves = scales.shape[1]
    of_tiles = in_tiles(scales.view(np.uint16)[..., 0], halves)
    of_fragments = of_tiles.reshape(len(of_tiles), halves // 2, 2, 8, 2).transpose(0, 1, 3, 2, 4)
    return np.ascontiguousarray(of_fragments).view(np.uint8).reshape(len(of_tiles), halves // 2, 8, 8)
