"""Rows of K and V in float8_e4m3fn and int8, in NumPy: the definition that ``plugins/attention`` follows bit by bit.

A real value is a stored value times a scale. Every operation is one of float32, rounded to nearest, ties to even.
"""

from __future__ import annotations

import numpy as np

from trt_kvcache.dtypes import SCALED_KV_DTYPES, numpy_dtype
from trt_kvcache.kernels.host.arrays import Array


def row_scales(rows: Array, dtype: str) -> Array:
    """Return a scale for each row: its largest magnitude becomes the largest value that is stored.

    Parameters
    ----------
    rows : array [..., D]
        K or V. NaN does not count.
    dtype : str
        What they will be stored as: ``"float8_e4m3fn"`` or ``"int8"``.

    Returns
    -------
    array [...]
        float32; 1 for a row of zeros.
    """
    largest = np.fmax.reduce(np.abs(rows.astype(np.float32)), axis=-1, initial=np.float32(0))
    scales: Array = np.where(largest == 0, np.float32(1), largest / np.float32(SCALED_KV_DTYPES[dtype]))
    return scales


def quantize(rows: Array, scales: Array, dtype: str) -> Array:
    """Return rows divided by their scales, rounded, and held within the largest value that is stored.

    Parameters
    ----------
    rows : array [..., D]
        K or V.
    scales : array [...]
        float32, one for each row.
    dtype : str
        ``"float8_e4m3fn"``, in which NaN stays NaN; or ``"int8"``, in which it becomes 0.
    """
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
    """Return what stored rows ``[..., D]`` stand for with their scales ``[...]``, in float32."""
    real: Array = stored.astype(np.float32) * scales[..., None]
    return real
