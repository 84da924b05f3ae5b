"""One table of dtypes: our name, its NumPy dtype, its DLPack code.

The names are those that Hugging Face and ml_dtypes use. TensorRT's names for them are in :mod:`trt_kvcache.trt.module`, the
one place that imports TensorRT.
"""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from trt_kvcache.errors import DTypeError


@dataclass(frozen=True)
class DType:
    """One row of the table."""

    name: str
    numpy: np.dtype[Any]
    dlpack_code: int  # DLDataTypeCode; the bits follow from the size


_DLPACK_INT, _DLPACK_UINT, _DLPACK_FLOAT, _DLPACK_BFLOAT, _DLPACK_FLOAT8_E4M3FN = 0, 1, 2, 4, 10

_TABLE = {
    row.name: row
    for row in (
        DType("float16", np.dtype(np.float16), _DLPACK_FLOAT),
        DType("bfloat16", np.dtype(ml_dtypes.bfloat16), _DLPACK_BFLOAT),
        DType("float32", np.dtype(np.float32), _DLPACK_FLOAT),
        DType("float8_e4m3fn", np.dtype(ml_dtypes.float8_e4m3fn), _DLPACK_FLOAT8_E4M3FN),
        DType("int8", np.dtype(np.int8), _DLPACK_INT),
        DType("uint8", np.dtype(np.uint8), _DLPACK_UINT),
        DType("int32", np.dtype(np.int32), _DLPACK_INT),
        DType("int64", np.dtype(np.int64), _DLPACK_INT),
    )
}
_NAME_OF_NUMPY = {row.numpy: row.name for row in _TABLE.values()}

#: Dtypes of K and V in a cache. The last two are quantized: a real value is ``stored * scale``.
KV_DTYPES = ("float16", "bfloat16", "float32", "float8_e4m3fn", "int8")

#: The quantized K/V dtypes, and the largest value of each.
SCALED_KV_DTYPES = {"float8_e4m3fn": 448.0, "int8": 127.0}

#: Short names of dtypes, accepted from users; files and results have the full name.
DTYPE_SHORT_NAMES = {
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "float": "float32",
    "fp8": "float8_e4m3fn",
}

#: Names that users may give for a quantized K/V dtype.
SCALED_KV_DTYPE_NAMES = ("fp8", *SCALED_KV_DTYPES)

#: Granularity of the scales of quantized K and V: one a layer, one a head (both static), or one a token and head (dynamic).
KV_SCALES = ("tensor", "head", "token")

#: Dtypes of weights and activations.
MODEL_DTYPES = ("float16", "bfloat16", "float32")


def dtype_in_full(name: Any) -> Any:
    """Return the full name of a short dtype name (``"fp8"``: ``"float8_e4m3fn"``); anything else unchanged, for a later check."""
    return DTYPE_SHORT_NAMES.get(name, name) if isinstance(name, str) else name


def _row(name: str) -> DType:
    row = _TABLE.get(name) if isinstance(name, str) else None
    if row is None:
        raise DTypeError(f"dtype: expected one of {', '.join(_TABLE)}, got {name!r}.")
    return row


def itemsize(name: str) -> int:
    """Return the bytes of one element, or raise :class:`~trt_kvcache.errors.DTypeError` for an unknown name."""
    return _row(name).numpy.itemsize


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy (or ml_dtypes) dtype of a name, or raise :class:`~trt_kvcache.errors.DTypeError` for an unknown one."""
    return _row(name).numpy


def dlpack_code(name: str) -> int:
    """Return the DLPack type code of a name, or raise :class:`~trt_kvcache.errors.DTypeError` for an unknown one."""
    return _row(name).dlpack_code


def dtype_name(dtype: Any) -> str:
    """Return our name of a NumPy dtype, or raise :class:`~trt_kvcache.errors.DTypeError` for one that the table does not have."""
    name = _NAME_OF_NUMPY.get(np.dtype(dtype))
    if name is None:
        raise DTypeError(f"dtype: expected one of {', '.join(_TABLE)}, got NumPy dtype {np.dtype(dtype)}.")
    return name
