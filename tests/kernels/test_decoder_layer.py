"""What a decoder layer does between its matrix products, on the host, the emulated device and a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.errors import DTypeError, LayoutError, ShapeError
from trt_kvcache.kernels import add_rms_norm, silu_mul
from trt_kvcache.memory.tensor import DeviceTensor

DTYPES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
#: Half a unit in the last place, and what float32 sums in another order add.
ROUNDING = {"float16": 2**-10, "bfloat16": 2**-7}


@pytest.fixture
def stream(memory):
    return memory.create_stream()


def rows(*shape, dtype, seed=0, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(numpy_dtype(dtype))


def close(found, expected, dtype):
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=ROUNDING[dtype], atol=1e-6 * np.abs(expected).max())


@DTYPES
@pytest.mark.parametrize("offset", [{}, {"weight_offset": 1.0}])
@pytest.mark.parametrize(("count", "columns"), [(1, 2), (3, 40), (2, 896), (5, 2050), (1, 8192)])
def test_add_rms_norm(memory, stream, dtype, offset, count, columns):
    hidden, change = (rows(count, columns, dtype=dtype, seed=seed, scale=3) for seed in (1, 2))
    weight = rows(columns, dtype=dtype, seed=3)
    tensors = [memory.to_device(array, stream=stream) for array in (hidden, change, weight, np.full_like(hidden, np.nan))]
    add_rms_norm(*tensors[:3], out=tensors[3], eps=1e-5, **offset, stream=stream)
    total = (hidden.astype(np.float32) + change.astype(np.float32)).astype(hidden.dtype)
    np.testing.assert_array_equal(tensors[0].numpy(), total)
    np.testing.assert_array_equal(tensors[1].numpy(), change)
    wide = total.astype(np.float64)
    factor = weight.astype(np.float64) + sum(offset.values())
    close(tensors[3].numpy(), wide / np.sqrt(np.mean(wide * wide, axis=1, keepdims=True) + 1e-5) * factor, dtype)


@DTYPES
@pytest.mark.parametrize(("count", "columns"), [(1, 2), (3, 40), (2, 4864), (5, 514)])
def test_silu_mul(memory, stream, dtype, count, columns):
    gate_up = rows(count, 2 * columns, dtype=dtype, scale=4)
    given, out = (memory.to_device(array, stream=stream) for array in (gate_up, np.full((count, columns), np.nan, gate_up.dtype)))
    silu_mul(given, out=out, stream=stream)
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    close(out.numpy(), gate / (1 + np.exp(-gate)) * up, dtype)


def test_what_does_not_fit_is_refused(memory, stream):
    def tensor(*shape, dtype="float16"):
        return memory.to_device(rows(*shape, dtype=dtype), stream=stream)

    hidden, weight = tensor(2, 6), tensor(6)
    before = hidden.numpy()
    every_other = DeviceTensor(tensor(2, 12).allocation, shape=(2, 6), dtype="float16", strides=(12, 2))
    for change, error, text in (
        (tensor(2, 8), ShapeError, r"change: expected shape \(2, 6\), got "),
        (tensor(2, 6, dtype="bfloat16"), DTypeError, "change: expected float16 or bfloat16, all of one dtype, got bfloat16"),
        (every_other, LayoutError, "change: expected a dense tensor, got "),
    ):
        with pytest.raises(error, match=text):
            add_rms_norm(hidden, change, weight, out=tensor(2, 6), eps=1e-5, stream=stream)
    with pytest.raises(ShapeError, match=r"hidden: expected .* an even number of columns"):
        add_rms_norm(tensor(2, 5), tensor(2, 5), tensor(5), out=tensor(2, 5), eps=1e-5, stream=stream)
    with pytest.raises(ShapeError, match=r"out: expected shape \(2, 2\), got "):
        silu_mul(tensor(2, 4), out=hidden, stream=stream)
    with pytest.raises(DTypeError, match="gate_up: expected float16 or bfloat16, all of one dtype, got float32"):
        silu_mul(tensor(2, 4, dtype="float32"), out=hidden, stream=stream)
    np.testing.assert_array_equal(hidden.numpy(), before)
