"""Rounding a matrix to the nearest integers of a scale, without calibration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.checkpoint.quantized.codes import Codes
from trt_kvcache.checkpoint.quantized.quantization import SCHEMES
from trt_kvcache.checkpoint.quantized.weight import QuantizedWeight, Scales
from trt_kvcache.dtypes import numpy_dtype

#: Elements that are rounded together, which bounds the memory beside the result.
_CHUNK = 1 << 22


def rounded_to_nearest(values: npt.NDArray[Any], scheme: str, dtype: str) -> QuantizedWeight:
    """Round a matrix.

    A group of int4 has the scale ``max(|w|) / 8``, of which -8 to 7 are multiples; int8 has ``max(|w|) / 127`` of a row. Codes are the
    nearest ones to the scale as it is stored.

    Parameters
    ----------
    values : ndarray ``[out, in]``
        The matrix.
    scheme : str
        One of :data:`~trt_kvcache.checkpoint.quantized.quantization.SCHEMES`. The last group of inputs may be smaller.
    dtype : {"float16", "bfloat16", "float32"}
        Of the scales.

    Returns
    -------
    QuantizedWeight
        New memory, packed. A scale is infinite or NaN where a value is.

    Examples
    --------
    >>> import numpy as np
    >>> weight = rounded_to_nearest(np.array([[-127, 3.4], [0.5, 1.0]], np.float32), "int8", "float32")
    >>> weight.codes.unpacked()
    array([[-127,    3],
           [  64,  127]], dtype=int8)
    """
    bits, group = SCHEMES[scheme]
    outputs, inputs = values.shape
    width = group or inputs
    blocks, stored_width = -(-inputs // width), -(-inputs * bits // 8)
    codes = np.empty((outputs, stored_width), np.uint8)
    scales = np.empty((outputs, blocks), numpy_dtype(dtype))
    for rows in _row_chunks(outputs, inputs):
        groups = _groups(values[rows], blocks, width)
        scales[rows] = _scales(groups, bits).astype(scales.dtype)
        found = _codes(groups, scales[rows].astype(np.float32), bits).reshape(-1, blocks * width)
        codes[rows] = (found.view(np.uint8) if bits == 8 else _packed(found))[:, :stored_width]
    stored = codes.view(np.int8) if bits == 8 else codes
    return QuantizedWeight(
        codes=Codes(stored=stored, kind=f"int{bits}", shape=(outputs, inputs)), scales=Scales(stored=scales, block=(1, width))
    )


def _row_chunks(outputs: int, inputs: int) -> Iterator[slice]:
    step = max(1, _CHUNK // inputs)
    return (slice(first, min(first + step, outputs)) for first in range(0, outputs, step))


def _groups(values: npt.NDArray[Any], blocks: int, width: int) -> npt.NDArray[np.float32]:
    """Return rows in groups ``[rows, blocks, width]``, with zeros behind the last inputs."""
    if values.shape[1] == blocks * width:
        return values.astype(np.float32).reshape(-1, blocks, width)
    whole = np.zeros((len(values), blocks * width), np.float32)
    whole[:, : values.shape[1]] = values
    return whole.reshape(-1, blocks, width)


def _scales(groups: npt.NDArray[np.float32], bits: int) -> npt.NDArray[np.float32]:
    limit = 8 if bits == 4 else 127
    scales: npt.NDArray[np.float32] = np.abs(groups).max(axis=2) / np.float32(limit)
    return scales


def _codes(groups: npt.NDArray[np.float32], scales: npt.NDArray[np.float32], bits: int) -> npt.NDArray[np.int8]:
    """Return the nearest codes; those of groups whose scale is 0 are 0, and any of groups that hold something infinite."""
    low, high = (-8, 7) if bits == 4 else (-127, 127)
    divisors = np.where((scales > 0) & np.isfinite(scales), scales, np.float32(1))
    with np.errstate(invalid="ignore"):
        codes: npt.NDArray[np.int8] = np.clip(np.rint(groups / divisors[..., None]), low, high).astype(np.int8)
    return np.where(scales[..., None] > 0, codes, np.int8(0))


def _packed(codes: npt.NDArray[np.int8]) -> npt.NDArray[np.uint8]:
    """Return two codes a byte, the first in the low bits."""
    nibbles = codes.view(np.uint8) & np.uint8(15)
    packed: npt.NDArray[np.uint8] = nibbles[:, 0::2] | nibbles[:, 1::2] << np.uint8(4)
    return packed
