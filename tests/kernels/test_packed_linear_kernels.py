"""Products of a few rows with packed weights, and packed weights in 16 bits, on the host, the emulated device and a GPU."""

from __future__ import annotations

from contextlib import contextmanager

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.packed_arrays import FLOAT8, pack_rows, pack_tiles, pack_values
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.kernels import linear_tiles
from trt_kvcache.kernels.nvfp4_scales import nvfp4_kernel_factor, nvfp4_scales
from trt_kvcache.kernels.packed_layout import (
    MIDDLES,
    NVFP4_GROUPS,
    ONE_GROUP,
    count_groups,
    unpack_rows,
    unpack_values,
)
from trt_kvcache.kernels.packed_linear_kernels import (
    packed_dequantize_kernel,
    packed_linear_gated_mul_kernel,
    packed_linear_kernel,
)
from trt_kvcache.kernels.packed_tensors import PackedTensors
from trt_kvcache.kernels.source_variants import SCALE_DTYPES

PAIRS = [(dtype, scale) for dtype, scales in SCALE_DTYPES.items() for scale in scales]
DTYPES = pytest.mark.parametrize(("dtype", "scale_dtype"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
KINDS = pytest.mark.parametrize("kind", ["int4", "int8", "e4m3"])
FORMATS = pytest.mark.parametrize(
    ("kind", "with_zero_points"),
    [("int4", False), ("int4", True), ("int8", False), ("int8", True), ("e4m3", False)],
    ids=["int4", "int4-zero_points", "int8", "int8-zero_points", "e4m3"],
)
LIMITS = {"int4": (0, 16), "int8": (-128, 128)}
LARGEST = {"int4": 16, "int8": 128, "e4m3": 448}

#: Rounding errors: of a result, half a unit in the last place; of a float32 sum in any order, relative to the sum of absolute values.
ROUNDING, SUM_ROUNDING = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-24}, 2**-23

#: Rows, outputs, inputs, group shift: fragments, steps and groups of all warps that end early, and one more of each.
SHAPES = [
    *((1, 16, 64, 0), (8, 33, 136, 1), (3, 48, 1024, 2), (5, 17, 1096, 0), (1, 100, 2056, ONE_GROUP), (2, 35, 5192, 2)),
    *((9, 18, 520, 0), (16, 40, 1096, 1), (13, 16, 3144, ONE_GROUP)),
]


@pytest.fixture
def stream(memory):
    return memory.create_stream()


def random_values(random, kind, shape):
    """Quantized values, the least and the largest among them."""
    if kind == "e4m3":
        values = random.choice(FLOAT8, shape)
        values.reshape(-1)[:2] = FLOAT8.min(), FLOAT8.max()
        return values
    values = random.integers(*LIMITS[kind], shape).astype(np.int8 if kind == "int8" else np.uint8)
    values.reshape(-1)[:2] = LIMITS[kind][0], LIMITS[kind][1] - 1
    return values


class Problem:
    """Random operands, and the product in float64 of weights that NumPy rounds. ``out`` is full of NaNs."""

    def __init__(
        self, memory, stream, shape, kind, dtype, scale_dtype, with_zero_points, *, gated=False, out_dtype=None, bias=False, shared=False
    ):
        rows, columns, inputs, shift = shape
        outputs, self.dtype, self.out_dtype = columns * (2 if gated else 1), dtype, out_dtype or dtype
        random, groups = np.random.default_rng(sum(shape)), count_groups(inputs, shift)
        self.x = random.standard_normal((rows, inputs)).astype(numpy_dtype(dtype))
        values = random_values(random, kind, (outputs, inputs))
        size = inputs**-0.5 / LARGEST[kind]
        scales = (random.uniform(0.2, 2, (outputs, groups)) * random.choice([-1, 1], (outputs, groups)) * size).astype(
            numpy_dtype(scale_dtype)
        )
        if shared:
            scales = np.repeat(scales[::16], 16, axis=0)[:outputs]
        zeros = random_values(random, kind, (outputs, groups))
        group = np.arange(inputs) // 32 >> shift
        middles = zeros.astype(np.float32)[:, group] if with_zero_points else MIDDLES[kind]
        self.weight = ((values.astype(np.float32) - middles) * scales.astype(np.float32)[:, group]).astype(numpy_dtype(dtype))
        self.bias = random.standard_normal(outputs).astype(numpy_dtype(dtype)) if bias else None

        def upload(array):
            return memory.to_device(array, stream=stream)

        self.packed = PackedTensors(
            kind=kind,
            outputs=outputs,
            inputs=inputs,
            group_shift=shift,
            values=upload(pack_values(values, kind)),
            scales=upload((pack_tiles if shared else pack_rows)(scales, groups)),
            zero_points=upload(pack_rows(zeros, groups)) if with_zero_points else None,
        )
        self.tensors = (upload(self.x), self.packed, None if self.bias is None else upload(self.bias))
        self.out = upload(np.full((rows, columns), np.nan, numpy_dtype(self.out_dtype)))

    def sums(self):
        """The sums of products, and of their absolute values. A product of matrices would have threads, which ThreadSanitizer looks at."""
        x, weight = self.x.astype(np.float64), self.weight.astype(np.float64)
        bias = 0.0 if self.bias is None else self.bias.astype(np.float64)
        sums, sizes = (np.einsum("ri,oi->ro", rows, weights) for rows, weights in ((x, weight), (np.abs(x), np.abs(weight))))
        return sums + bias, sizes + np.abs(bias)

    def check(self, expected, tolerance):
        error = np.abs(self.out.numpy().astype(np.float64) - expected)
        assert np.all(error <= np.abs(expected) * ROUNDING[self.out_dtype] * 1.01 + tolerance), error.max()

    def check_gated(self, activation):
        sums, sizes = self.sums()
        (gate, up), (gate_size, up_size) = (np.split(one, 2, axis=1) for one in (sums, sizes))
        activated = gate / (1 + np.exp(-(gate if activation == "silu" else np.sqrt(8 / np.pi) * (gate + 0.044715 * gate**3))))
        per_sum = self.weight.shape[1] * SUM_ROUNDING
        # The slope of both is at most 1.13; a few units for the exponential.
        tolerance = per_sum * (1.13 * gate_size * np.abs(up) + np.abs(activated) * up_size) + 2**-20 * np.abs(activated * up)
        self.check(activated * up, tolerance + 1e-30)


@contextmanager
def few_multiprocessors(memory, large_percent, monkeypatch):
    """Two multiprocessors, so that a block has several tiles: large ones from this percentage on."""
    if not memory.is_host:
        monkeypatch.setattr(memory, "multiprocessor_count", 2)
    chosen = linear_tiles.linear_tiles
    monkeypatch.setattr(linear_tiles, "linear_tiles", lambda *of: chosen(*of)._replace(large_percent=large_percent))
    linear_tiles.linear_plan.cache_clear()
    try:
        yield
    finally:
        linear_tiles.linear_plan.cache_clear()


def check_linear(memory, stream, shape, *arguments, **options):
    problem = Problem(memory, stream, shape, *arguments, **options)
    packed_linear_kernel(*problem.tensors, problem.out, stream)
    expected, size = problem.sums()
    problem.check(expected, size * shape[2] * SUM_ROUNDING)


@KINDS
@pytest.mark.parametrize("shape", [(1, 8), (16, 64), (40, 200), (33, 128)], ids=str)
def test_layout(kind, shape):
    random = np.random.default_rng(0)
    values = random_values(random, kind, shape)
    packed = pack_values(values, kind)
    assert packed.nbytes == -(-shape[0] // 16) * -(-shape[1] // 64) * (512 if kind == "int4" else 1024)
    np.testing.assert_array_equal(unpack_values(packed, kind, shape), values)
    rows = random.random((shape[0], 5))
    np.testing.assert_array_equal(unpack_rows(pack_rows(rows, 6), shape[0])[:, :5], rows)
    shared = np.repeat(rows[::16], 16, axis=0)[: shape[0]]
    np.testing.assert_array_equal(unpack_rows(pack_tiles(shared, 6), shape[0])[:, :5], shared)


@DTYPES
@pytest.mark.parametrize("kind", LIMITS)
@pytest.mark.parametrize("with_zero_points", [False, True], ids=["", "zero_points"])
def test_dequantized_weights_bit_for_bit(memory, stream, kind, dtype, scale_dtype, with_zero_points):
    """Every quantized value with every zero point, with scales of all sizes: the products are rounded once."""
    low, high = LIMITS[kind]
    count = high - low
    outputs, inputs = count, max(count, 136)
    values = (low + np.arange(outputs * inputs) % count).reshape(outputs, inputs).astype(np.int8 if kind == "int8" else np.uint8)
    zeros = (low + np.arange(outputs)).astype(values.dtype)[:, None].repeat(count_groups(inputs, 0), 1)
    random = np.random.default_rng(5)
    exponents = random.uniform(-20, 2, zeros.shape)
    scales = (2.0**exponents * random.choice([-1, 1], zeros.shape)).astype(numpy_dtype(scale_dtype))
    scales[0, 0] = 0
    packed = PackedTensors(
        kind=kind,
        outputs=outputs,
        inputs=inputs,
        group_shift=0,
        values=memory.to_device(pack_values(values, kind), stream=stream),
        scales=memory.to_device(pack_rows(scales, zeros.shape[1]), stream=stream),
        zero_points=memory.to_device(pack_rows(zeros, zeros.shape[1]), stream=stream) if with_zero_points else None,
    )
    group = np.arange(inputs) // 32
    middles = zeros.astype(np.float32)[:, group] if with_zero_points else MIDDLES[kind]
    expected = ((values.astype(np.float32) - middles) * scales.astype(np.float32)[:, group]).astype(numpy_dtype(dtype))
    first = 0
    while first < outputs:
        out = memory.to_device(np.full((min(32, outputs - first), inputs), np.nan, expected.dtype), stream=stream)
        packed_dequantize_kernel(out, packed, first, stream)
        np.testing.assert_array_equal(out.numpy().astype(np.float32), expected[first : first + len(out)].astype(np.float32))
        first += len(out)


@DTYPES
@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
def test_every_value_of_fp8_bit_for_bit(memory, stream, dtype, scale_dtype, shared):
    """With scales of all sizes, all bits of float32 among them: rounded as in float32, to infinity and to subnormal numbers too."""
    outputs, inputs = 48, 3 * 128
    values = np.resize(FLOAT8, (outputs, inputs))
    random, ends = np.random.default_rng(6), np.finfo(np.float32) if scale_dtype != "float16" else np.finfo(np.float16)
    exponents = random.uniform(np.log2(float(ends.smallest_subnormal)), ends.maxexp - 1, (outputs, 3))
    scales = (2.0**exponents * random.choice([-1, 1], (outputs, 3))).astype(numpy_dtype(scale_dtype))
    if shared:
        scales = np.repeat(scales[::16], 16, axis=0)
    packed = PackedTensors(
        kind="e4m3",
        outputs=outputs,
        inputs=inputs,
        group_shift=2,
        values=memory.to_device(pack_values(values, "e4m3"), stream=stream),
        scales=memory.to_device((pack_tiles if shared else pack_rows)(scales, 3), stream=stream),
        zero_points=None,
    )
    with np.errstate(over="ignore"):
        expected = (values.astype(np.float32) * np.repeat(scales.astype(np.float32), 128, axis=1)).astype(numpy_dtype(dtype))
    out = memory.to_device(np.full((32, inputs), np.nan, expected.dtype), stream=stream)
    packed_dequantize_kernel(out, packed, 16, stream)
    np.testing.assert_array_equal(out.numpy().view(np.uint16), expected[16:].view(np.uint16))


def test_dequantized_outputs_of_a_tile_that_ends_early(memory, stream):
    problem = Problem(memory, stream, (1, 25, 200, 0), "int4", "float16", "float16", True)
    out = memory.to_device(np.full((25, 200), np.nan, np.float16), stream=stream)
    packed_dequantize_kernel(out, problem.packed, 0, stream)
    np.testing.assert_array_equal(out.numpy(), problem.weight)


@DTYPES
@FORMATS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_linear(memory, stream, shape, kind, dtype, scale_dtype, with_zero_points):
    check_linear(memory, stream, shape, kind, dtype, scale_dtype, with_zero_points, bias=shape[1] % 2 == 0)


@FORMATS
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 33, 72, 0), (8, 70, 1160, 1), (12, 16, 64, ONE_GROUP)], ids=str)
def test_float32_results(memory, stream, shape, kind, dtype, with_zero_points):
    check_linear(memory, stream, shape, kind, dtype, "float16", with_zero_points, out_dtype="float32")


@pytest.mark.parametrize("shape", [(1, 16, 64, 0), (5, 33, 1096, 2), (12, 48, 520, ONE_GROUP)], ids=str)
@DTYPES
def test_scales_that_the_outputs_of_a_tile_share(memory, stream, shape, dtype, scale_dtype):
    check_linear(memory, stream, shape, "e4m3", dtype, scale_dtype, False, shared=True)


@FORMATS
@pytest.mark.parametrize(("dtype", "scale_dtype"), [("float16", "float16"), ("bfloat16", "bfloat16"), ("bfloat16", "float16")])
@pytest.mark.parametrize("shape", [(1, 16, 64, 0), (8, 48, 1160, 2), (14, 32, 520, ONE_GROUP)], ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_products(memory, stream, shape, kind, dtype, scale_dtype, with_zero_points, activation):
    problem = Problem(memory, stream, shape, kind, dtype, scale_dtype, with_zero_points, gated=True, bias=shape[0] > 1)
    packed_linear_gated_mul_kernel(*problem.tensors, problem.out, activation, stream)
    problem.check_gated(activation)


@KINDS
@pytest.mark.parametrize("large_percent", [0, 1000], ids=["large", "small"])
def test_several_tiles_of_a_block(memory, stream, kind, large_percent, monkeypatch):
    with few_multiprocessors(memory, large_percent, monkeypatch):
        check_linear(memory, stream, (3, 1000, 136, 0), kind, "bfloat16", "float16", kind in LIMITS)
        check_linear(memory, stream, (8, 300, 4168, 2), kind, "float16", "float16", False, bias=True)
        check_linear(memory, stream, (2, 515, 64, ONE_GROUP), kind, "bfloat16", "bfloat16", kind in LIMITS, out_dtype="float32")


@KINDS
def test_rows_do_not_change_each_other(memory, stream, kind):
    """A row that is not finite is so alone."""
    problem = Problem(memory, stream, (8, 40, 1096, 0), kind, "bfloat16", "float16", kind in LIMITS)
    problem.x[3, 5], problem.x[6, 1095] = np.nan, np.inf
    packed_linear_kernel(memory.to_device(problem.x, stream=stream), problem.packed, None, problem.out, stream)
    finite = np.isfinite(problem.out.numpy().astype(np.float64)).all(axis=1)
    assert finite.tolist() == [row not in (3, 6) for row in range(8)]


@KINDS
def test_the_same_bits_each_time(memory, stream, kind):
    problem = Problem(memory, stream, (5, 200, 1160, 1), kind, "float16", "float16", kind in LIMITS, bias=True)
    found = []
    for _ in range(3):
        packed_linear_kernel(*problem.tensors, problem.out, stream)
        found.append(problem.out.numpy())
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_padding_is_not_read_as_weights(memory, stream):
    """Scales and values behind the last input are not finite or zero: nothing of them is in the result."""
    problem = Problem(memory, stream, (2, 16, 40, 0), "int4", "float16", "float16", False)
    values = unpack_values(problem.packed.values.numpy(), "int4", (16, 64))
    values = values.copy()
    values[:, 40:] = 15
    packed = PackedTensors(
        kind="int4",
        outputs=16,
        inputs=40,
        group_shift=0,
        values=memory.to_device(pack_values(values, "int4"), stream=stream),
        scales=problem.packed.scales,
        zero_points=None,
    )
    packed_linear_kernel(problem.tensors[0], packed, None, problem.out, stream)
    expected, size = problem.sums()
    problem.check(expected, size * 40 * SUM_ROUNDING)


def test_plans_have_whole_tiles():
    for kind in LARGEST:
        for outputs in (2560, 4096, 128256):
            plan = linear_tiles.linear_plan(1, outputs, False, "sm_90", 132, kind)
            assert plan.tile_outputs == plan.tile
            assert (plan.tiles - 1) * plan.tile_outputs < outputs <= plan.tiles * plan.tile_outputs
    nbytes = {kind: linear_tiles.linear_plan(1, 4096, False, "sm_90", 132, kind).prefetched_steps for kind in (None, "int8", "int4")}
    assert nbytes["int4"] >= nbytes["int8"] >= nbytes[None]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 33, 72), (8, 48, 1160), (14, 32, 520)], ids=str)
def test_fp4_with_scales_that_are_powers_of_two(memory, stream, shape, dtype):
    """The values and the scales of MXFP4, in the place of the weights of a problem."""
    _, outputs, inputs = shape
    problem = Problem(memory, stream, (*shape, 0), "int4", dtype, "float16", False)
    random, groups = np.random.default_rng(1), count_groups(inputs, 0)
    values = random.integers(0, 16, (outputs, inputs)).astype(np.uint8)
    scales = random.integers(120, 124, (outputs, groups)).astype(np.uint8)
    real = values.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    real *= scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)[:, np.arange(inputs) // 32]
    problem.weight = real.astype(numpy_dtype(dtype))
    packed = PackedTensors(
        kind="e2m1",
        outputs=outputs,
        inputs=inputs,
        group_shift=0,
        values=memory.to_device(pack_values(values, "e2m1"), stream=stream),
        scales=memory.to_device(pack_rows(scales, groups), stream=stream),
        zero_points=None,
    )
    packed_linear_kernel(problem.tensors[0], packed, None, problem.out, stream)
    expected, size = problem.sums()
    problem.check(expected, size * inputs * SUM_ROUNDING)


def inverse(divisor):
    """The inverse of a divisor of compressed-tensors, as a sum."""
    high = float(np.float32(1 / divisor))
    return high, float(np.float32(1 / divisor - high))


#: Factors of ModelOpt: the kernels of bfloat16 take another one for the second; and small. Divisors for which elements of float16 and of
#: bfloat16 show each rounding of a scale.
FACTORS = {
    "factor": (float(np.float32(0.00042)), 0.0),
    "changed factor": (float(np.float32(0.00021758056)), 0.0),
    "small factor": (2.0**-79, 0.0),
    "divisor": inverse(1706.5430908203125),
    "another": inverse(1402.911376953125),
}
factors = pytest.mark.parametrize("factor", FACTORS.values(), ids=FACTORS)


def nvfp4_problem(memory, stream, shape, dtype, factor, **options):
    """The values and the scales of NVFP4, in the place of the weights of a problem."""
    problem = Problem(memory, stream, (*shape, 0), "int4", dtype, "float16", False, **options)
    (outputs, inputs), random = problem.weight.shape, np.random.default_rng(1)
    groups = count_groups(inputs, NVFP4_GROUPS)
    values = random.integers(0, 16, (outputs, inputs)).astype(np.uint8)
    scales = (random.uniform(2, 100, (outputs, groups)) * random.choice([-1, 1], (outputs, groups))).astype(ml_dtypes.float8_e4m3fn)
    exact = nvfp4_scales(scales, factor)[:, np.arange(inputs) // 16]
    problem.weight = (values.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * exact).astype(numpy_dtype(dtype))
    problem.packed = PackedTensors(
        kind="e2m1",
        outputs=outputs,
        inputs=inputs,
        group_shift=NVFP4_GROUPS,
        values=memory.to_device(pack_values(values, "e2m1"), stream=stream),
        scales=memory.to_device(pack_rows(scales, groups), stream=stream),
        zero_points=None,
        factor=factor,
        kernel_factor=nvfp4_kernel_factor(factor, dtype),
    )
    problem.tensors = (problem.tensors[0], problem.packed, problem.tensors[2])
    return problem


def check_nvfp4(memory, stream, shape, dtype, factor, **options):
    problem = nvfp4_problem(memory, stream, shape, dtype, factor, **options)
    packed_linear_kernel(*problem.tensors, problem.out, stream)
    expected, size = problem.sums()
    problem.check(expected, size * shape[2] * SUM_ROUNDING)


@factors
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_value_of_nvfp4_bit_for_bit(memory, stream, dtype, factor):
    """Each value with each scale: rounded to float32, then to an element, to subnormal ones too. Zeros of both signs are one."""
    outputs, inputs = 80, 16 * len(FLOAT8) + 8
    values = np.resize(np.arange(16, dtype=np.uint8), (outputs, inputs))
    groups = count_groups(inputs, NVFP4_GROUPS)
    scales = np.zeros((outputs, groups), FLOAT8.dtype)
    for output in range(outputs):
        scales[output, : len(FLOAT8)] = np.roll(FLOAT8, output)
    packed = PackedTensors(
        kind="e2m1",
        outputs=outputs,
        inputs=inputs,
        group_shift=NVFP4_GROUPS,
        values=memory.to_device(pack_values(values, "e2m1"), stream=stream),
        scales=memory.to_device(pack_rows(scales, groups), stream=stream),
        zero_points=None,
        factor=factor,
        kernel_factor=nvfp4_kernel_factor(factor, dtype),
    )
    exact = nvfp4_scales(scales, factor)[:, np.arange(inputs) // 16]
    expected = (values.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * exact).astype(numpy_dtype(dtype))
    for first in (0, 48):
        out = memory.to_device(np.full((32, inputs), np.nan, expected.dtype), stream=stream)
        packed_dequantize_kernel(out, packed, first, stream)
        np.testing.assert_array_equal(out.numpy().astype(np.float32), expected[first : first + 32].astype(np.float32))


@pytest.mark.parametrize("factor", [FACTORS["factor"], FACTORS["divisor"]], ids=["factor", "divisor"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "shape", [(1, 16, 64), (8, 33, 136), (3, 48, 1024), (5, 17, 1096), (2, 35, 5192), (9, 18, 520), (16, 40, 3144)], ids=str
)
def test_nvfp4(memory, stream, shape, dtype, factor):
    check_nvfp4(memory, stream, shape, dtype, factor, bias=shape[1] % 2 == 0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 33, 72), (8, 70, 1160), (12, 16, 64)], ids=str)
def test_float32_results_of_nvfp4(memory, stream, shape, dtype):
    check_nvfp4(memory, stream, shape, dtype, FACTORS["divisor"], out_dtype="float32")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_products_of_nvfp4(memory, stream, dtype, activation):
    for shape in ((1, 16, 64), (8, 48, 1160), (14, 32, 520)):
        problem = nvfp4_problem(memory, stream, shape, dtype, FACTORS["factor"], gated=True, bias=shape[0] > 1)
        packed_linear_gated_mul_kernel(*problem.tensors, problem.out, activation, stream)
        problem.check_gated(activation)


@pytest.mark.parametrize("large_percent", [0, 1000], ids=["large", "small"])
def test_several_tiles_of_nvfp4(memory, stream, large_percent, monkeypatch):
    with few_multiprocessors(memory, large_percent, monkeypatch):
        check_nvfp4(memory, stream, (3, 1000, 136), "bfloat16", FACTORS["factor"])
        check_nvfp4(memory, stream, (8, 300, 4168), "float16", FACTORS["divisor"], bias=True)
