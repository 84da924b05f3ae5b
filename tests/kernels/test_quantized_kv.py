"""Rows of K and V in eight bits: against a search over all values that are stored, for every float16 and for what is not finite."""

import numpy as np
import pytest

from tests.kernels.stored_kv import LARGEST, NAN_CODE, real, scale_of, stored
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.kernels.kv_quantization import dequantize, quantize, row_scales

KINDS = list(LARGEST)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [0.01, 1.0, 0.37, 150.0, 1e-30])
def test_every_float16(kind, scale):
    row = np.arange(65536, dtype=np.uint16).view(np.float16)
    scale = np.float32(scale)
    found = quantize(row[None], np.array([scale]), kind)[0]
    assert found.dtype == numpy_dtype(kind)
    assert found.tobytes() == stored(row, scale, kind).tobytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scales_of_rows(kind, dtype):
    rows = (np.random.default_rng(3).standard_normal((40, 5, 16)) * 10.0 ** np.arange(-4, 1)[:, None]).astype(numpy_dtype(dtype))
    rows[0, 0] = 0
    rows[1, 1, 3] = np.nan
    rows[2, 2] = np.nan
    rows[3, 3, 5] = -np.inf
    rows[4, 4] = np.finfo(np.float16).smallest_subnormal
    found = row_scales(rows, kind)
    assert found.dtype == np.float32
    assert found.tolist() == [[scale_of(row, kind).item() for row in some] for some in rows]
    assert found[0, 0] == found[2, 2] == 1
    assert found[3, 3] == np.inf


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_element_is_the_largest_that_is_stored(kind):
    rows = np.random.default_rng(4).standard_normal((30, 16)).astype(np.float16)
    found = np.abs(quantize(rows, row_scales(rows, kind), kind).astype(np.float32)).max(axis=1)
    assert found.tolist() == [LARGEST[kind]] * 30


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite(kind):
    found = quantize(np.array([[np.nan, np.inf, -np.inf, 1e30, -0.0]], np.float32), np.ones(1, np.float32), kind)
    assert found.view(np.uint8)[0, 0] == NAN_CODE[kind]
    assert found.astype(np.float64)[0, 1:].tolist() == [LARGEST[kind], -LARGEST[kind], LARGEST[kind], 0]


@pytest.mark.parametrize("kind", KINDS)
def test_dequantized_in_float32(kind):
    random = np.random.default_rng(5)
    rows = quantize(random.standard_normal((2, 3, 16)) * 50, np.ones((2, 3), np.float32), kind)
    scales = random.uniform(0.1, 1, (2, 3)).astype(np.float32)
    found = dequantize(rows, scales)
    assert found.dtype == np.float32
    assert found.tobytes() == real(rows, scales).tobytes()
