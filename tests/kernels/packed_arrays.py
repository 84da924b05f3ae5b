"""Packed weights made by NumPy: the inverse of ``unpack_values`` and ``unpack_rows`` of ``trt_kvcache/kernels/packed_layout.py``."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trt_kvcache.kernels.packed_layout import FRAGMENT_INPUTS, FRAGMENT_NBYTES, FRAGMENT_OUTPUTS, Array, count_tiles

#: All numbers of e4m3, without NaN.
FLOAT8 = np.array([bits for bits in range(256) if bits & 0x7F != 0x7F], np.uint8).view(ml_dtypes.float8_e4m3fn)


def pack_values(values: Array, kind: str) -> npt.NDArray[np.uint8]:
    """Return quantized values ``[outputs, inputs]`` (int4: 0 to 15; int8; bits of floats) as bytes ``[tiles, fragments * bytes]``."""
    outputs, inputs = values.shape
    tiles, fragments = count_tiles(outputs), -(-inputs // FRAGMENT_INPUTS)
    whole = values.view(np.uint8)
    if values.shape != (tiles * FRAGMENT_OUTPUTS, fragments * FRAGMENT_INPUTS):
        whole = np.zeros((tiles * FRAGMENT_OUTPUTS, fragments * FRAGMENT_INPUTS), np.uint8)
        whole[:outputs, :inputs] = values.view(np.uint8)
    if FRAGMENT_NBYTES[kind] == FRAGMENT_OUTPUTS * FRAGMENT_INPUTS:
        stored = whole.reshape(tiles, 2, 8, fragments, 2, 4, 8).transpose(0, 3, 4, 2, 5, 1, 6)
    else:
        split = whole.reshape(tiles, 2, 8, fragments, 2, 4, 2, 2, 2)
        stored = (split[..., 0, :] | split[..., 1, :] << np.uint8(4)).transpose(0, 3, 2, 5, 1, 4, 7, 6)
    return np.ascontiguousarray(stored).reshape(tiles, fragments * FRAGMENT_NBYTES[kind])


def pack_rows(of_rows: Array, groups: int) -> Array:
    """Return scales or zero points ``[outputs, groups]`` as ``[tiles, groups, 8, 2]``; ``groups``: with those of padding."""
    tiles = count_tiles(len(of_rows))
    whole = np.zeros((tiles * FRAGMENT_OUTPUTS, groups), of_rows.dtype)
    whole[: len(of_rows), : of_rows.shape[1]] = of_rows
    return np.ascontiguousarray(whole.reshape(tiles, 2, 8, groups).transpose(0, 3, 2, 1))


def pack_tiles(of_rows: Array, groups: int) -> Array:
    """Return scales ``[outputs, groups]`` that the outputs of each tile share as ``[tiles, groups, 1, 2]``."""
    return np.repeat(pack_rows(of_rows, groups)[:, :, :1, :1], 2, axis=3)
