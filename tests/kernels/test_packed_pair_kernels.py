"""Products of a few rows with two packed matrices of different formats in one launch: the bits of a launch for each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.kernels.packed_arrays import pack_rows, pack_values
from tests.kernels.test_super_block_kernels import DTYPES, ROUNDING, SUM_ROUNDING, Matrix
from trt_kvcache.dtypes import itemsize, numpy_dtype
from trt_kvcache.kernels import linear_tiles
from trt_kvcache.kernels.linear_tiles import PAIRS, pair_plan, pair_tiles
from trt_kvcache.kernels.packed_layout import count_groups
from trt_kvcache.kernels.packed_linear_kernels import packed_linear_kernel
from trt_kvcache.kernels.packed_pair_kernels import packed_linear_pair_kernel, pair_is_supported
from trt_kvcache.kernels.packed_tensors import PackedTensors
from trt_kvcache.memory.tensor import DeviceTensor

KINDS = pytest.mark.parametrize("kinds", PAIRS, ids="-".join)

#: Rows, outputs of both and inputs: parts of tiles, and whole ones; one matrix that has fewer tiles than the other.
SHAPES = [(1, (16, 16), 256), (5, (33, 70), 1280), (8, (100, 17), 512), (16, (7, 48), 1280)]

#: Columns on both sides of the result, which nothing may write.
MARGIN = 3


class ByteMatrix:
    """Random weights of 8 bits with a scale of 32 inputs, as of Q8_0."""

    def __init__(self, outputs, inputs, seed):
        random, groups = np.random.default_rng(seed), count_groups(inputs, 0)
        self.values = random.integers(-128, 128, (outputs, inputs)).astype(np.int8)
        self.scales = (random.uniform(-1, 1, (outputs, groups)) * inputs**-0.5 / 64).astype(np.float16)
        self.weights = self.values.astype(np.float32) * np.repeat(self.scales.astype(np.float32), 32, axis=1)[:, :inputs]

    def on(self, memory, stream):
        outputs, inputs = self.values.shape
        values, scales = pack_values(self.values, "int8"), pack_rows(self.scales, self.scales.shape[1])
        values, scales = (memory.to_device(array, stream=stream) for array in (values, scales))
        shape = {"outputs": outputs, "inputs": inputs, "group_shift": 0}
        return PackedTensors(kind="int8", **shape, values=values, scales=scales, zero_points=None)


def matrix_of(kind, outputs, inputs, seed):
    return ByteMatrix(outputs, inputs, seed) if kind == "int8" else Matrix(kind, outputs, inputs, seed=seed)


class Problem:
    """Random operands. Results are columns of a wider tensor of NaNs."""

    def __init__(self, memory, stream, shape, kinds, dtype, *, bias=False):
        self.memory, self.stream, self.dtype = memory, stream, numpy_dtype(dtype)
        rows, counts, inputs = shape
        random, self.outputs = np.random.default_rng(sum(counts)), sum(counts)
        self.x = random.standard_normal((rows, inputs)).astype(self.dtype)
        matrices = [matrix_of(kind, count, inputs, seed) for seed, (kind, count) in enumerate(zip(kinds, counts, strict=True))]
        self.weight = np.concatenate([matrix.weights for matrix in matrices]).astype(self.dtype)
        self.bias = random.standard_normal(self.outputs).astype(self.dtype) if bias else None
        self.pair = tuple(matrix.on(memory, stream) for matrix in matrices)
        self.bias_tensor = None if self.bias is None else memory.to_device(self.bias, stream=stream)
        self.x_tensor = memory.to_device(self.x, stream=stream)

    def columns(self, whole, first, count):
        offset = (MARGIN + first) * itemsize(whole.dtype)
        return DeviceTensor(whole.allocation, shape=(len(whole), count), dtype=whole.dtype, strides=whole.strides, offset=offset)

    def computed(self, write):
        """Return what a function writes into the columns of a wider tensor, of which it writes nothing else."""
        whole = self.memory.to_device(np.full((len(self.x), self.outputs + 2 * MARGIN), np.nan, self.dtype), stream=self.stream)
        write(whole)
        found = whole.numpy().astype(np.float32)
        margins = np.concatenate([found[:, :MARGIN], found[:, -MARGIN:]], axis=1)
        assert np.isnan(margins).all()
        return found[:, MARGIN:-MARGIN]

    def in_one_launch(self):
        return self.computed(
            lambda whole: packed_linear_pair_kernel(
                self.x_tensor, self.pair, self.bias_tensor, self.columns(whole, 0, self.outputs), self.stream
            )
        )

    def in_two_launches(self):
        def write(whole):
            first = 0
            for matrix in self.pair:
                bias = None if self.bias_tensor is None else self.bias_tensor[first : first + matrix.outputs]
                packed_linear_kernel(self.x_tensor, matrix, bias, self.columns(whole, first, matrix.outputs), self.stream)
                first += matrix.outputs

        return self.computed(write)

    def check(self):
        """Check both against float64, and each other bit for bit."""
        x, weight = self.x.astype(np.float64), self.weight.astype(np.float64)
        bias = 0.0 if self.bias is None else self.bias.astype(np.float64)
        sums, sizes = (np.einsum("ri,oi->ro", *both) for both in ((x, weight), (np.abs(x), np.abs(weight))))
        found = self.in_one_launch()
        error, tolerance = np.abs(found - (sums + bias)), (sizes + np.abs(bias)) * x.shape[1] * SUM_ROUNDING
        assert np.all(error <= np.abs(sums + bias) * ROUNDING[self.dtype.name] * 1.01 + tolerance), error.max()
        np.testing.assert_array_equal(found, self.in_two_launches())


@pytest.fixture
def stream(memory):
    return memory.create_stream()


@KINDS
@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear(memory, stream, shape, kinds, dtype):
    Problem(memory, stream, shape, kinds, dtype, bias=shape[0] > 1).check()


@KINDS
def test_the_wider_format_first(memory, stream, kinds):
    Problem(memory, stream, (3, (33, 20), 512), kinds[::-1], "bfloat16", bias=True).check()


@pytest.mark.parametrize("kinds", [("q4_k", "q6_k"), ("q5_k", "int8")], ids="-".join)
@pytest.mark.parametrize("large_percent", [0, 1000], ids=["large", "small"])
def test_several_tiles_of_a_block(memory, stream, kinds, large_percent, monkeypatch):
    """With tiles of either matrix, of both, and an odd and an even number of them before the second one."""
    if not memory.is_host:
        monkeypatch.setattr(memory, "multiprocessor_count", 3)
    chosen = linear_tiles.linear_tiles
    monkeypatch.setattr(linear_tiles, "linear_tiles", lambda *of: chosen(*of)._replace(large_percent=large_percent))
    pair_plan.cache_clear()
    try:
        for counts in ((150, 100), (20, 300), (230, 9)):
            Problem(memory, stream, (3, counts, 1280), kinds, "float16", bias=True).check()
    finally:
        pair_plan.cache_clear()


def test_rows_do_not_change_each_other(memory, stream):
    """A row that is not finite is so alone."""
    problem = Problem(memory, stream, (8, (40, 24), 1280), ("q4_k", "q6_k"), "bfloat16")
    problem.x[3, 5], problem.x[6, 1279] = np.nan, np.inf
    problem.x_tensor = memory.to_device(problem.x, stream=stream)
    finite = np.isfinite(problem.in_one_launch()).all(axis=1)
    assert finite.tolist() == [row not in (3, 6) for row in range(8)]


def test_pairs_that_have_kernels(memory, stream):
    byte = ByteMatrix(16, 256, 0).on(memory, stream)
    super_blocks = {kind: Matrix(kind, 16, 256).on(memory, stream) for kind in ("q4_k", "q5_k", "q6_k")}
    of_kinds = {**super_blocks, "int8": byte}
    for first, one in of_kinds.items():
        for second, other in of_kinds.items():
            assert pair_is_supported(one, other) == (first != second)
    wide = memory.to_device(np.zeros(byte.scales.shape, np.float32), stream=stream)
    zeros = memory.to_device(np.zeros(byte.scales.shape, np.int8), stream=stream)
    for other in (replace(byte, scales=wide), replace(byte, zero_points=zeros), replace(byte, kind="e4m3")):
        assert not pair_is_supported(super_blocks["q4_k"], other)


def test_a_plan_shares_tiles_and_blocks():
    """q and k, and v, of Llama-3-8B in Q4_K_M on a GPU of 132 multiprocessors."""
    plan = pair_plan(1, (5120, 1024), ("q4_k", "q6_k"), "sm_90", 132)
    assert (plan.rows, plan.tile, plan.tiles, plan.blocks) == (8, 16, (320, 64), 132)
    assert pair_plan(9, (20, 40), ("q4_k", "q6_k"), "sm_90", 132).blocks == 5
    assert all(steps > 0 for steps in plan.prefetched_steps)
    assert pair_tiles(16, "sm_90", ("q4_k", "int8")).loads == 4, "the registers of the narrower format"
