"""Columns of rows in another order, on the host, the emulated device and a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.kernels.column_order_kernels import gather_columns_kernel


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 8), (3, 136), (17, 520), (2, 2056)], ids=str)
def test_columns_in_another_order(memory, shape, dtype):
    stream, random = memory.create_stream(), np.random.default_rng(0)
    x = random.standard_normal(shape).astype(numpy_dtype(dtype))
    order = random.permutation(shape[1]).astype(np.int32)
    out = memory.to_device(np.full((shape[0] + 1, shape[1]), np.nan, x.dtype), stream=stream)
    gather_columns_kernel(memory.to_device(x, stream=stream), memory.to_device(order, stream=stream), out[: shape[0]], stream)
    np.testing.assert_array_equal(out.numpy()[:-1].view(np.uint16), x[:, order].view(np.uint16))
    assert np.isnan(out.numpy()[-1].astype(np.float32)).all()
