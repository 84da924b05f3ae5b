"""Quantized K and V by search: of all values that a dtype can hold, the nearest. What the twin and the kernels must store bit by bit."""

import numpy as np

from trt_kvcache.dtypes import numpy_dtype

LARGEST = {"float8_e4m3fn": 448.0, "int8": 127.0}

#: What NaN is stored as.
NAN_CODE = {"float8_e4m3fn": 0x7F, "int8": 0}


def scale_of(row, dtype):
    """Return the float32 scale of one row."""
    largest = max((abs(value) for value in row.astype(np.float32).tolist() if value == value), default=0.0)
    return np.float32(largest) / np.float32(LARGEST[dtype]) if largest else np.float32(1)


def stored(row, scale, dtype):
    """Return the elements of a row as they are stored; halfway between two values the one with an even code."""
    kind, codes = numpy_dtype(dtype), np.arange(256, dtype=np.uint8)
    allowed = codes[np.abs(codes.view(kind).astype(np.float64)) <= LARGEST[dtype]]
    values = allowed.view(kind).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        quotients = (row.astype(np.float32) / np.float32(scale)).astype(np.float64)[:, None]
    distances = np.abs(np.clip(quotients, -LARGEST[dtype], LARGEST[dtype]) - values)
    distances[np.isnan(distances)] = 0
    preference = 2 * (allowed % 2) + (np.signbit(values) != np.signbit(quotients))
    found = allowed[np.where(distances == distances.min(axis=1, keepdims=True), preference, 9).argmin(axis=1)]
    return np.where(np.isnan(quotients[:, 0]), np.uint8(NAN_CODE[dtype]), found).view(kind)


def real(rows, scales):
    """Return what stored rows [..., D] stand for, in float32."""
    return rows.astype(np.float32) * scales[..., None]
