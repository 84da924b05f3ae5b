"""Quantized rows of K and V, float8_e4m3fn and int8, in NumPy: the definition that ``plugins/attention`` follows bit by bit.

A real value is a stored value times a scale. Every operation is in float32, rounded to nearest, ties to even.
"""

from __future__ import annotations

import numpy as np

from trt_kvcache.dtypes import SCALED_KV_DTYPES, numpy_dtype
from trt_kvcache.kernels.host_arrays import Array

#: Dimensions of the scales of one slot, if each token has its own.
_BY_TOKEN = 3


def row_scales(rows: Array, dtype: str) -> Array:
    """Return a float32 scale for each row ``[..., D]``: largest magnitude / largest stored value; 1 for zeros. NaN does not count."""
    largest = np.fmax.reduce(np.abs(rows.astype(np.float32)), axis=-1, initial=np.float32(0))
    scales: Array = np.where(largest == 0, np.float32(1), largest / np.float32(SCALED_KV_DTYPES[dtype]))
    return scales


def quantize(rows: Array, scales: Array, dtype: str) -> Array:
    """Return rows divided by their scales, rounded and clipped to the range of the dtype. NaN stays in float8, and becomes 0 in int8."""
    largest = np.float32(SCALED_KV_DTYPES[dtype])
    with np.errstate(invalid="ignore", over="ignore"):  # infinite rows; a static scale that is far too small
        quotients = rows.astype(np.float32) / scales[..., None]
    nothing = np.isnan(quotients)
    held = np.clip(np.where(nothing, np.float32(0), quotients), -largest, largest)
    stored: Array = (np.rint(held) if dtype == "int8" else held).astype(numpy_dtype(dtype))
    if dtype != "int8":
        stored[nothing] = np.nan
    return stored


def dequantize(stored: Array, scales: Array) -> Array:
    """Return the real values of stored rows ``[..., D]`` with their scales ``[...]``, in float32."""
    real: Array = stored.astype(np.float32) * scales[..., None]
    return real


def append_rows(cache: Array, scales: Array | None, start: int, keys: Array, values: Array, dtype: str) -> None:
    """Write keys and values (n, H, D) of new tokens into a slot (2, H, S, D), and their scales, if it has scales by token.

    ``scales``: (2, H), or by token (2, H, S or more), or None for a cache that is not quantized.
    """
    rows = np.stack([keys, values]).swapaxes(1, 2)
    window = slice(start, start + len(keys))
    if scales is None:
        cache[:, :, window] = rows
        return
    if scales.ndim == _BY_TOKEN:
        scales[:, :, window] = row_scales(rows, dtype)
    cache[:, :, window] = quantize(rows, _scales_of(scales, window), dtype)


def live_rows(cache: Array, scales: Array | None, window: slice) -> Array:
    """Return the real values of a window of rows of a slot, (2, H, tokens, D) float32. Other arguments as for :func:`append_rows`."""
    stored = cache[:, :, window]
    rows: Array = stored.astype(np.float32) if scales is None else dequantize(stored, _scales_of(scales, window))
    return rows


def _scales_of(scales: Array, window: slice) -> Array:
    return scales[:, :, window] if scales.ndim == _BY_TOKEN else scales[:, :, None]
