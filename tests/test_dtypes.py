import ml_dtypes
import numpy as np
import pytest

from trt_kvcache import dtypes
from trt_kvcache.errors import DTypeError

# name, bytes, NumPy dtype, DLPack type code (the table of dlpack.h)
TABLE = [
    ("float16", 2, np.float16, 2),
    ("bfloat16", 2, ml_dtypes.bfloat16, 4),
    ("float32", 4, np.float32, 2),
    ("float8_e4m3fn", 1, ml_dtypes.float8_e4m3fn, 10),
    ("int8", 1, np.int8, 0),
    ("uint8", 1, np.uint8, 1),
    ("int32", 4, np.int32, 0),
    ("int64", 8, np.int64, 0),
]


def test_table():
    for name, nbytes, dtype, code in TABLE:
        assert (dtypes.itemsize(name), dtypes.numpy_dtype(name), dtypes.dlpack_code(name)) == (nbytes, np.dtype(dtype), code)
        assert dtypes.dtype_name(dtype) == dtypes.dtype_name(np.zeros(1, dtype).dtype) == name
    names = [row[0] for row in TABLE]
    assert ((*names[:5],), (*names[3:5],), (*names[:3],)) == (dtypes.KV_DTYPES, dtypes.SCALED_KV_DTYPES, dtypes.MODEL_DTYPES)


BY_NAME = [dtypes.itemsize, dtypes.numpy_dtype, dtypes.dlpack_code]
UNKNOWN = [(function, name, repr(name)) for function in BY_NAME for name in ("float64", "FLOAT16", "", None, np.float16, ["float16"])]
NUMPY = [np.float64, np.bool_, object, np.dtype(">i4"), ml_dtypes.float8_e5m2]
UNKNOWN += [(dtypes.dtype_name, dtype, f"NumPy dtype {np.dtype(dtype)}") for dtype in NUMPY]


@pytest.mark.parametrize(("function", "dtype", "got"), UNKNOWN)
def test_what_is_unknown_is_refused(function, dtype, got):
    with pytest.raises(DTypeError) as caught:
        function(dtype)
    assert str(caught.value) == f"dtype: expected one of {', '.join(row[0] for row in TABLE)}, got {got}."
