"""Products of a few rows with weights in super-blocks, and those weights in 16 bits, on the host, the emulated device and a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.super_block_arrays import pack_factors, pack_scales, pack_super_blocks
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.kernels import linear_tiles
from trt_kvcache.kernels.packed_linear_kernels import packed_dequantize_kernel, packed_linear_gated_mul_kernel, packed_linear_kernel
from trt_kvcache.kernels.packed_tensors import SuperBlockTensors
from trt_kvcache.kernels.super_block_layout import (
    SCALE_INPUTS,
    fragment_nbytes,
    unpack_scales,
    unpack_super_blocks,
)

KINDS = pytest.mark.parametrize("kind", ["q4_k", "q5_k", "q6_k"])
DTYPES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
VALUES = {"q4_k": 16, "q5_k": 32, "q6_k": 64}

#: Rounding errors: of a result, half a unit in the last place; of a float32 sum in any order, relative to the sum of absolute values.
ROUNDING, SUM_ROUNDING = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-24}, 2**-23

#: Rows, outputs and inputs: tiles, fragments and steps of all warps that end early, and whole ones.
SHAPES = [(1, 16, 256), (8, 33, 1024), (3, 100, 1280), (5, 17, 2560), (9, 40, 512), (16, 18, 1280)]


@pytest.fixture
def stream(memory):
    return memory.create_stream()


def weights_of(values, scales, factors, kind):
    """The definition, value by value in float64, rounded to float32 as by the gguf package: products are exact."""
    of_input = np.arange(values.shape[1])
    block = factors[:, of_input // 256].astype(np.float64)
    group = of_input // SCALE_INPUTS[kind]
    if kind == "q6_k":
        return ((values.astype(np.float64) - 32) * (block[..., 0] * scales[:, group])).astype(np.float32)
    product, minimum = values * (block[..., 0] * scales[:, group, 0]), block[..., 1] * scales[:, group, 1]
    return (product - minimum).astype(np.float32)


class Matrix:
    """Random quantized values with the largest and the smallest of each kind of number, and their weights."""

    def __init__(self, kind, outputs, inputs, seed=0, exponents=(-9, -4)):
        random = np.random.default_rng(seed)
        self.values = random.integers(0, VALUES[kind], (outputs, inputs)).astype(np.uint8)
        count = inputs // SCALE_INPUTS[kind]
        if kind == "q6_k":
            self.scales = random.integers(-128, 128, (outputs, count)).astype(np.int8)
            self.scales[0, :3] = -128, 127, 0
            stored = self.scales.view(np.uint8).reshape(outputs, -1, 2)
        else:
            self.scales = stored = random.integers(0, 64, (outputs, count, 2)).astype(np.uint8)
            self.scales[0, 0], self.scales[0, 1] = (63, 0), (0, 63)
        shape = (outputs, inputs // 256, 1 if kind == "q6_k" else 2)
        self.factors = (2.0 ** random.uniform(*exponents, shape) * random.choice([-1, 1], shape)).astype(np.float16) / np.float16(16)
        self.factors[-1, 0] = 0
        self.weights = weights_of(self.values, self.scales, self.factors, kind)
        self.arrays = pack_super_blocks(self.values, kind), pack_scales(stored), pack_factors(self.factors)
        self.kind, self.shape = kind, (outputs, inputs)

    def on(self, memory, stream):
        values, scales, factors = (memory.to_device(array, stream=stream) for array in self.arrays)
        outputs, inputs = self.shape
        return SuperBlockTensors(kind=self.kind, outputs=outputs, inputs=inputs, values=values, scales=scales, factors=factors)


class Problem:
    """Random operands, and the product in float64 of the rounded weights. ``out`` is full of NaNs."""

    def __init__(self, memory, stream, shape, kind, dtype, *, gated=False, out_dtype=None, bias=False):
        rows, columns, inputs = shape
        outputs, self.out_dtype = columns * (2 if gated else 1), out_dtype or dtype
        random = np.random.default_rng(sum(shape))
        self.x = random.standard_normal((rows, inputs)).astype(numpy_dtype(dtype))
        matrix = Matrix(kind, outputs, inputs, seed=sum(shape))
        self.weight, self.packed = matrix.weights.astype(numpy_dtype(dtype)), matrix.on(memory, stream)
        self.bias = random.standard_normal(outputs).astype(numpy_dtype(dtype)) if bias else None
        bias_tensor = None if self.bias is None else memory.to_device(self.bias, stream=stream)
        self.tensors = (memory.to_device(self.x, stream=stream), self.packed, bias_tensor)
        self.out = memory.to_device(np.full((rows, columns), np.nan, numpy_dtype(self.out_dtype)), stream=stream)

    def sums(self):
        """The sums of products, and of their absolute values. A product of matrices would have threads, which ThreadSanitizer looks at."""
        x, weight = self.x.astype(np.float64), self.weight.astype(np.float64)
        bias = 0.0 if self.bias is None else self.bias.astype(np.float64)
        sums, sizes = (np.einsum("ri,oi->ro", rows, weights) for rows, weights in ((x, weight), (np.abs(x), np.abs(weight))))
        return sums + bias, sizes + np.abs(bias)

    def check(self, expected, tolerance):
        error = np.abs(self.out.numpy().astype(np.float64) - expected)
        assert np.all(error <= np.abs(expected) * ROUNDING[self.out_dtype] * 1.01 + tolerance), error.max()


def check_linear(memory, stream, shape, *arguments, **options):
    problem = Problem(memory, stream, shape, *arguments, **options)
    packed_linear_kernel(*problem.tensors, problem.out, stream)
    expected, size = problem.sums()
    problem.check(expected, size * shape[2] * SUM_ROUNDING)


@KINDS
@pytest.mark.parametrize("shape", [(16, 256), (40, 512)], ids=str)
def test_layout(kind, shape):
    matrix = Matrix(kind, *shape)
    values, scales, factors = matrix.arrays
    assert values.nbytes == -(-shape[0] // 16) * (shape[1] // 64) * fragment_nbytes(kind)
    np.testing.assert_array_equal(unpack_super_blocks(values, kind, shape), matrix.values)
    stored = unpack_scales(scales, shape[0])
    np.testing.assert_array_equal(stored.reshape(-1), matrix.scales.view(np.uint8).reshape(-1))
    assert factors.shape == (-(-shape[0] // 16), shape[1] // 256, 8, 2, 1 if kind == "q6_k" else 2)


@KINDS
@pytest.mark.parametrize("stored_bits", [{"q4_k": 144, "q5_k": 176, "q6_k": 210}])
def test_packed_bytes_are_within_three_percent_of_a_file(kind, stored_bits):
    arrays = Matrix(kind, 64, 1024).arrays
    assert sum(array.nbytes for array in arrays) <= 1.03 * 64 * 4 * stored_bits[kind]


@KINDS
@DTYPES
def test_dequantized_weights_bit_for_bit(memory, stream, kind, dtype):
    """Every quantized value with scales, minimums and factors of all sizes."""
    matrix = Matrix(kind, 40, 512, exponents=(-18, 6))
    packed, expected = matrix.on(memory, stream), matrix.weights.astype(numpy_dtype(dtype))
    for first in (0, 16, 32):
        out = memory.to_device(np.full((min(16, 40 - first), 512), np.nan, expected.dtype), stream=stream)
        packed_dequantize_kernel(out, packed, first, stream)
        np.testing.assert_array_equal(out.numpy().astype(np.float32), expected[first : first + len(out)].astype(np.float32))


@KINDS
@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear(memory, stream, shape, kind, dtype):
    check_linear(memory, stream, shape, kind, dtype, bias=shape[1] % 2 == 0)


@KINDS
@DTYPES
@pytest.mark.parametrize("shape", [(1, 33, 256), (12, 70, 1280)], ids=str)
def test_float32_results(memory, stream, shape, kind, dtype):
    check_linear(memory, stream, shape, kind, dtype, out_dtype="float32")


@KINDS
@DTYPES
@pytest.mark.parametrize("shape", [(1, 16, 256), (14, 48, 1280)], ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_products(memory, stream, shape, kind, dtype, activation):
    problem = Problem(memory, stream, shape, kind, dtype, gated=True, bias=shape[0] > 1)
    packed_linear_gated_mul_kernel(*problem.tensors, problem.out, activation, stream)
    sums, sizes = problem.sums()
    (gate, up), (gate_size, up_size) = (np.split(one, 2, axis=1) for one in (sums, sizes))
    with np.errstate(over="ignore"):
        activated = gate / (1 + np.exp(-(gate if activation == "silu" else np.sqrt(8 / np.pi) * (gate + 0.044715 * gate**3))))
    per_sum = shape[2] * SUM_ROUNDING
    # The slope of both is at most 1.13; a few units for the exponential.
    tolerance = per_sum * (1.13 * gate_size * np.abs(up) + np.abs(activated) * up_size) + 2**-20 * np.abs(activated * up)
    problem.check(activated * up, tolerance + 1e-30)


@KINDS
@pytest.mark.parametrize("large_percent", [0, 1000], ids=["large", "small"])
def test_several_tiles_of_a_block(memory, stream, kind, large_percent, monkeypatch):
    if not memory.is_host:
        monkeypatch.setattr(memory, "multiprocessor_count", 2)
    chosen = linear_tiles.linear_tiles
    monkeypatch.setattr(linear_tiles, "linear_tiles", lambda *of: chosen(*of)._replace(large_percent=large_percent))
    linear_tiles.linear_plan.cache_clear()
    try:
        check_linear(memory, stream, (3, 300, 256), kind, "bfloat16")
        check_linear(memory, stream, (8, 150, 2304), kind, "float16", bias=True)
    finally:
        linear_tiles.linear_plan.cache_clear()


@KINDS
def test_rows_do_not_change_each_other(memory, stream, kind):
    """A row that is not finite is so alone."""
    problem = Problem(memory, stream, (8, 40, 1280), kind, "bfloat16")
    problem.x[3, 5], problem.x[6, 1279] = np.nan, np.inf
    packed_linear_kernel(memory.to_device(problem.x, stream=stream), problem.packed, None, problem.out, stream)
    finite = np.isfinite(problem.out.numpy().astype(np.float64)).all(axis=1)
    assert finite.tolist() == [row not in (3, 6) for row in range(8)]


@KINDS
def test_the_same_bits_each_time(memory, stream, kind):
    problem = Problem(memory, stream, (5, 200, 1280), kind, "float16", bias=True)
    found = []
    for _ in range(3):
        packed_linear_kernel(*problem.tensors, problem.out, stream)
        found.append(problem.out.numpy())
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])
