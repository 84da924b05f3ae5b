import ml_dtypes
import numpy as np
import pytest

from tests.helpers.assertions import raises
from trt_kvcache import KVCacheConfig, KVLayerConfig, MambaCacheConfig, dtypes
from trt_kvcache.builder.options import BuildOptions
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
NAMES = "float16, bfloat16, float32, float8_e4m3fn, int8, uint8, int32, int64"


@pytest.mark.parametrize(("name", "nbytes", "dtype", "code"), TABLE)
def test_table(name, nbytes, dtype, code):
    assert dtypes.itemsize(name) == nbytes
    assert dtypes.numpy_dtype(name) == np.dtype(dtype)
    assert dtypes.dtype_name(dtype) == name
    assert dtypes.dtype_name(np.zeros(1, dtype).dtype) == name
    assert dtypes.dlpack_code(name) == code


def test_what_a_cache_can_hold():
    assert dtypes.KV_DTYPES == ("float16", "bfloat16", "float32", "float8_e4m3fn", "int8")
    assert dtypes.SCALED_KV_DTYPES == {"float8_e4m3fn": 448, "int8": 127}
    assert dtypes.MODEL_DTYPES == ("float16", "bfloat16", "float32")


@pytest.mark.parametrize("name", ["float64", "half", "FLOAT16", "", None, np.float16, ["float16"]])
@pytest.mark.parametrize("function", [dtypes.itemsize, dtypes.numpy_dtype, dtypes.dlpack_code])
def test_an_unknown_name_is_refused(function, name):
    with pytest.raises(DTypeError) as caught:
        function(name)
    assert str(caught.value) == f"dtype: expected one of {NAMES}, got {name!r}."


@pytest.mark.parametrize("dtype", [np.float64, np.uint16, np.bool_, np.complex64, object, np.dtype(">i4"), ml_dtypes.float8_e5m2])
def test_an_unknown_numpy_dtype_is_refused(dtype):
    with raises(DTypeError, "dtype", expected=NAMES, got=f"NumPy dtype {np.dtype(dtype)}"):
        dtypes.dtype_name(dtype)


@pytest.mark.parametrize(
    ("short", "name"),
    [("fp16", "float16"), ("half", "float16"), ("bf16", "bfloat16"), ("fp32", "float32"), ("float", "float32"), ("fp8", "float8_e4m3fn")],
)
def test_short_names_are_taken_where_users_name_a_dtype(short, name):
    layers = [KVLayerConfig(num_kv_heads=2, head_dim=16)]
    kv = {"layers": layers, "max_batch_size": 1, "max_sequence_length": 16}
    if name in dtypes.MODEL_DTYPES:
        assert BuildOptions(max_batch_size=1, max_sequence_length=16, max_prefill_length=16, dtype=short).dtype == name
        states = MambaCacheConfig(num_layers=1, max_batch_size=1, conv_kernel=4, conv_dim=8, conv_dtype=short, recurrent_dtype=short)
        assert (states.conv_dtype, states.recurrent_dtype) == (name, name)
        assert KVCacheConfig(**kv, dtype=short) == KVCacheConfig(**kv, dtype=name)
    assert dtypes.dtype_in_full(short) == dtypes.dtype_in_full(name) == name


@pytest.mark.parametrize("other", [None, 3, "FP16", ["fp16"], np.float16])
def test_anything_else_is_left_for_its_check(other):
    assert dtypes.dtype_in_full(other) is other
