"""Products of a few rows with a matrix of weights, on the host, the emulated device and a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.assertions import raises
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.errors import DTypeError, LayoutError, PlaceError, ShapeError
from trt_kvcache.kernels import linear, linear_gelu_tanh_mul, linear_silu_mul, linear_tiles
from trt_kvcache.kernels.linear_kernels import MAX_LINEAR_ROWS
from trt_kvcache.kernels.linear_tiles import ROW_COUNTS, linear_plan
from trt_kvcache.memory.tensor import DeviceTensor

DTYPES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
BIAS = pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])

#: Rounding errors: of a result, half a unit in the last place; of a float32 sum in any order, relative to the sum of absolute values.
ROUNDING, SUM_ROUNDING = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-24}, 2**-23

#: Rows, outputs, inputs: tiles that end early, runs, steps and groups of all warps that do, and one more of each.
SHAPES = [
    *((1, 1, 8), (2, 17, 24), (8, 16, 64), (3, 33, 72), (5, 40, 504), (1, 48, 512), (7, 31, 520)),
    *((4, 7, 1024), (6, 50, 1032), (1, 19, 2048), (8, 100, 2064), (2, 5, 4872)),
    *((9, 18, 520), (16, 3, 1096), (11, 35, 136), (13, 16, 1024), (15, 20, 584)),
]


@pytest.fixture
def stream(memory):
    return memory.create_stream()


class Problem:
    """Random operands, and what they give in float64. Behind x and the weights are NaNs, and ``out`` is full of them."""

    def __init__(self, memory, stream, rows, outputs, inputs, dtype, with_bias, *, gated=False, out_dtype=None):
        random, self.dtype = np.random.default_rng(rows + outputs + inputs), out_dtype or dtype
        outputs_of_weight = outputs * (2 if gated else 1)
        self.x, self.weight = (random.standard_normal((count, inputs)).astype(numpy_dtype(dtype)) for count in (rows, outputs_of_weight))
        self.weight[...] = self.weight * inputs**-0.5
        self.bias = random.standard_normal(outputs_of_weight).astype(numpy_dtype(dtype)) if with_bias else None
        self.memory, self.stream = memory, stream
        self.tensors = [self.followed_by_nan(one) for one in (self.x, self.weight)]
        self.options = {} if self.bias is None else {"bias": memory.to_device(self.bias, stream=stream)}
        self.out = memory.to_device(np.full((rows, outputs), np.nan, numpy_dtype(self.dtype)), stream=stream)

    def followed_by_nan(self, array):
        with_more = np.concatenate([array, np.full((1, array.shape[1]), np.nan, array.dtype)])
        whole = self.memory.to_device(with_more, stream=self.stream)
        return DeviceTensor(whole.allocation, shape=array.shape, dtype=whole.dtype)

    def sums(self):
        """The sums of products, and of their absolute values. A product of matrices would have threads, which ThreadSanitizer looks at."""
        x, weight = self.x.astype(np.float64), self.weight.astype(np.float64)
        bias = 0.0 if self.bias is None else self.bias.astype(np.float64)
        sums, sizes = (np.einsum("ri,oi->ro", rows, weights) for rows, weights in ((x, weight), (np.abs(x), np.abs(weight))))
        return sums + bias, sizes + np.abs(bias)

    def check(self, expected, tolerance):
        error = np.abs(self.out.numpy().astype(np.float64) - expected)
        assert np.all(error <= np.abs(expected) * ROUNDING[self.dtype] * 1.01 + tolerance), error.max()


def check_linear(memory, stream, shape, dtype, with_bias=False, **options):
    problem = Problem(memory, stream, *shape, dtype, with_bias, **options)
    linear(*problem.tensors, **problem.options, out=problem.out, stream=stream)
    expected, size = problem.sums()
    problem.check(expected, size * shape[2] * SUM_ROUNDING)


@DTYPES
@BIAS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear(memory, stream, shape, dtype, with_bias):
    check_linear(memory, stream, shape, dtype, with_bias)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 33, 72), (8, 16, 520), (12, 5, 64)], ids=str)
def test_float32_results(memory, stream, shape, dtype):
    check_linear(memory, stream, shape, dtype, out_dtype="float32")


@DTYPES
@BIAS
@pytest.mark.parametrize("shape", [(1, 1, 8), (8, 16, 64), (3, 33, 72), (7, 50, 1032), (1, 19, 2048), (14, 17, 520)], ids=str)
@pytest.mark.parametrize("kernel", [linear_silu_mul, linear_gelu_tanh_mul])
def test_gated_products(memory, stream, shape, dtype, with_bias, kernel):
    problem = Problem(memory, stream, *shape, dtype, with_bias, gated=True)
    kernel(*problem.tensors, **problem.options, out=problem.out, stream=stream)
    sums, sizes = problem.sums()
    (gate, up), (gate_size, up_size) = (np.split(one, 2, axis=1) for one in (sums, sizes))
    activated = gate / (1 + np.exp(-(gate if kernel is linear_silu_mul else np.sqrt(8 / np.pi) * (gate + 0.044715 * gate**3))))
    per_sum = shape[2] * SUM_ROUNDING
    # The slope of both is at most 1.13; a few units for the exponential.
    tolerance = per_sum * (1.13 * gate_size * np.abs(up) + np.abs(activated) * up_size) + 2**-20 * np.abs(activated * up)
    problem.check(activated * up, tolerance + 1e-30)


@DTYPES
@pytest.mark.parametrize("large_percent", [0, 1000], ids=["large", "small"])
@pytest.mark.usefixtures("few_multiprocessors")
def test_several_tiles_of_a_block(memory, stream, dtype, large_percent, monkeypatch):
    chosen = linear_tiles.linear_tiles
    monkeypatch.setattr(linear_tiles, "linear_tiles", lambda *of: chosen(*of)._replace(large_percent=large_percent))
    linear_tiles.linear_plan.cache_clear()
    check_linear(memory, stream, (3, 1000, 136), dtype)
    check_linear(memory, stream, (8, 999, 4104), dtype, with_bias=True)
    check_linear(memory, stream, (2, 515, 64), dtype, out_dtype="float32")
    check_linear(memory, stream, (8, 70, 2056), dtype)  # fewer outputs than a large tile has room for
    linear_tiles.linear_plan.cache_clear()


def test_the_same_bits_each_time(memory, stream):
    problem = Problem(memory, stream, 5, 200, 1160, "float16", True)
    found = []
    for _ in range(3):
        linear(*problem.tensors, **problem.options, out=problem.out, stream=stream)
        found.append(problem.out.numpy())
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_rows_do_not_change_each_other(memory, stream):
    """A row that is not finite is so alone."""
    problem = Problem(memory, stream, 8, 40, 1096, "bfloat16", False)
    problem.x[3, 5], problem.x[6, 1095] = np.nan, np.inf
    tensors = [memory.to_device(problem.x, stream=stream), problem.tensors[1]]
    linear(*tensors, out=problem.out, stream=stream)
    finite = np.isfinite(problem.out.numpy().astype(np.float64)).all(axis=1)
    assert finite.tolist() == [row not in (3, 6) for row in range(8)]


@pytest.fixture
def few_multiprocessors(memory, monkeypatch):
    """Launches as for a GPU of 2 multiprocessors: blocks have several tiles."""
    if not memory.is_host:
        monkeypatch.setattr(memory, "multiprocessor_count", 2)


def test_plans():
    """Every output has a tile, no block is without one, and large products have large tiles."""
    for rows in (1, 8, 9, 16):
        for outputs in (1, 16, 17, 896, 4096, 28672, 128256):
            for gated in (False, True):
                plan = linear_plan(rows, outputs, gated, "sm_90", 132)
                assert rows <= plan.rows in ROW_COUNTS
                assert plan.tile_outputs <= (16 if gated else plan.tile)
                assert (plan.tiles - 1) * plan.tile_outputs < outputs <= plan.tiles * plan.tile_outputs
                assert 1 <= plan.blocks <= min(plan.tiles, 132 * linear_tiles.linear_tiles(plan.rows, "sm_90").blocks_per_sm)
                assert gated <= (plan.tile == 32)
    assert [linear_plan(1, outputs, False, "sm_90", 132).tile for outputs in (896, 4096, 6144)] == [16, 32, 16], "busy multiprocessors"
    assert linear_plan(1, 128256, False, "sm_90", 132).tile == 32
    even = [linear_plan(1, outputs, False, "sm_90", 132) for outputs in (2560, 3072, 5120)]
    assert [plan.tile for plan in even] == [32, 32, 32]
    assert [(plan.blocks, plan.tiles, plan.tile_outputs) for plan in even] == [(128, 128, 20), (128, 128, 24), (132, 256, 20)]
    steps = [linear_plan(1, 6144, False, *gpu).prefetched_steps for gpu in (("sm_90", 132), ("sm_80", 108))]
    assert steps == [1, 0], "no launch starts early on sm_80"


class TestWhatDoesNotFitIsRefused:
    @pytest.fixture
    def tensor(self, memory, stream):
        return lambda *shape, dtype="float16": memory.to_device(np.ones(shape, numpy_dtype(dtype)), stream=stream)

    @pytest.mark.parametrize("function", [linear, linear_silu_mul, linear_gelu_tanh_mul])
    @pytest.mark.parametrize(
        ("changed", "error", "text"),
        [
            ({"x": ((2, 12), "float16")}, ShapeError, r"x: expected \[1 to 16 rows, a multiple of 8 inputs, at most 16777216\], got "),
            ({"x": ((MAX_LINEAR_ROWS + 1, 16), "float16")}, ShapeError, "x: expected .1 to 16 rows"),
            ({"x": ((0, 16), "float16")}, ShapeError, "x: expected .1 to 16 rows"),
            ({"x": ((2, 1, 16), "float16")}, ShapeError, "x: expected .1 to 16 rows"),
            ({"x": ((2, 16), "float32")}, DTypeError, "x: expected float16 or bfloat16, got float32"),
            ({"weight": ((6, 24), "float16")}, ShapeError, r"weight: expected \[outputs.*, 16 inputs\], got "),
            ({"weight": ((6, 16), "bfloat16")}, DTypeError, "weight: expected float16, got bfloat16"),
            ({"bias": ((5,), "float16")}, ShapeError, r"bias: expected shape \(6,\), got "),
            ({"bias": ((6,), "float32")}, DTypeError, "bias: expected float16, got float32"),
            ({"out": ((2, 5), "float16")}, ShapeError, r"out: expected shape \(2, [36]\), got "),
            ({"out": ((2, 6), "bfloat16")}, DTypeError, "out: expected float16.*, got bfloat16"),
        ],
    )
    def test_shapes_and_dtypes(self, tensor, stream, function, changed, error, text):
        columns = 6 if function is linear else 3
        sizes = {"x": ((2, 16), "float16"), "weight": ((6, 16), "float16"), "bias": ((6,), "float16"), "out": ((2, columns), "float16")}
        given = {name: tensor(*shape, dtype=dtype) for name, (shape, dtype) in {**sizes, **changed}.items()}
        with pytest.raises(error, match=text):
            function(given["x"], given["weight"], bias=given["bias"], out=given["out"], stream=stream)
        assert (given["out"].numpy() == 1).all()

    def test_an_odd_number_of_outputs_has_no_gate(self, tensor, stream):
        with raises(ShapeError, "weight", expected="[outputs of gate, then of up, 16 inputs]"):
            linear_silu_mul(tensor(2, 16), tensor(5, 16), out=tensor(2, 2), stream=stream)
        with raises(DTypeError, "out", "float16", "float32"):
            linear_silu_mul(tensor(2, 16), tensor(6, 16), out=tensor(2, 3, dtype="float32"), stream=stream)

    def test_rows_that_are_not_dense(self, tensor, stream):
        wide, out = tensor(4, 32), tensor(2, 6)
        strided = DeviceTensor(wide.allocation, shape=(2, 16), dtype="float16", strides=(32, 1))
        shifted = DeviceTensor(wide.allocation, shape=(2, 16), dtype="float16", offset=2)
        with raises(LayoutError, "x", "dense tensor"):
            linear(strided, tensor(6, 16), out=out, stream=stream)
        with raises(LayoutError, "x", expected="address at a multiple of 16 bytes", got="at byte 2"):
            linear(shifted, tensor(6, 16), out=out, stream=stream)
        with raises(LayoutError, "weight", expected="address at a multiple of 16 bytes"):
            linear(tensor(1, 16), shifted, out=tensor(1, 2), stream=stream)
        assert (out.numpy() == 1).all()

    @pytest.mark.parametrize("changed", ["bias", "out"])
    def test_an_address_between_elements(self, tensor, stream, changed):
        given = {"bias": tensor(6), "out": tensor(1, 6)}
        given[changed] = DeviceTensor(tensor(8).allocation, shape=given[changed].shape, dtype="float16", offset=1)
        with raises(LayoutError, changed, expected="address at a multiple of 2 bytes", got="at byte 1"):
            linear(tensor(1, 16), tensor(6, 16), **given, stream=stream)

    @pytest.mark.parametrize("overlapped", ["x", "weight", "bias"])
    @pytest.mark.parametrize("function", [linear, linear_silu_mul, linear_gelu_tanh_mul])
    def test_a_result_over_an_input(self, tensor, stream, function, overlapped):
        given = {"x": tensor(1, 16), "weight": tensor(16, 16), "bias": tensor(16)}
        allocation = given[overlapped].allocation
        columns = 16 if function is linear else 8
        out = DeviceTensor(allocation, shape=(1, columns), dtype="float16")
        with raises(LayoutError, "out", expected="memory of its own", got=overlapped):
            function(given["x"], given["weight"], bias=given["bias"], out=out, stream=stream)
        assert (given[overlapped].numpy() == 1).all()

    def test_what_is_no_tensor(self, tensor, stream):
        for changed in ("x", "weight", "out"):
            given = {"x": tensor(2, 16), "weight": tensor(6, 16), "out": tensor(2, 6), changed: np.ones((2, 16), np.float16)}
            with raises(PlaceError, changed, expected="DeviceTensor", got="ndarray"):
                linear(given["x"], given["weight"], out=given["out"], stream=stream)
