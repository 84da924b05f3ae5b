"""Products of a few rows with chosen experts in super-blocks, on the host, the emulated device and a GPU."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tests.kernels.super_block_arrays import pack_factors, pack_scales, pack_super_blocks
from tests.kernels.test_expert_kernels import BIAS, CLAMPED, DTYPES, Problem, check_down, check_up
from tests.kernels.test_super_block_kernels import KINDS, VALUES, weights_of
from tests.sweeps import each_once
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.kernels import linear_tiles
from trt_kvcache.kernels.expert_kernels import GATED_EPILOGUES, MAX_EXPERT_PAIRS, MAX_EXPERT_ROWS, PLAIN_EPILOGUES
from trt_kvcache.kernels.linear_tiles import expert_plan
from trt_kvcache.kernels.packed_layout import count_tiles
from trt_kvcache.kernels.packed_linear_kernels import packed_dequantize_kernel
from trt_kvcache.kernels.packed_tensors import SuperBlockTensors
from trt_kvcache.kernels.super_block_layout import FACTORS, SCALE_INPUTS
from trt_kvcache.memory.tensor import DeviceTensor

#: Rows, experts, experts of a row, outputs (with a gate, whole tiles), inputs: steps of some warps, of all, and of all and some.
SHAPES = [(1, 1, 1, 16, 256), (1, 9, 3, 48, 512), (2, 40, 4, 16, 256), (8, 7, 3, 32, 1280), (5, 12, 2, 64, 1024), (7, 3, 1, 16, 2304)]


@pytest.fixture
def stream(memory):
    return memory.create_stream()


class SuperBlockProblem(Problem):
    """Random weights of experts in super-blocks. Factors of those that nobody has chosen, and of what follows the weights, are NaN."""

    def __init__(self, memory, stream, shape, dtype, *, kind, **options):
        super().__init__(memory, stream, shape, dtype, **options)
        self.kind = kind
        experts, outputs, inputs = self.weight.shape
        groups, size = inputs // SCALE_INPUTS[kind], inputs**-0.5 / VALUES[kind]
        self.values = self.random.integers(0, VALUES[kind], self.weight.shape).astype(np.uint8)
        if kind == "q6_k":
            self.scales = self.random.integers(-128, 128, (experts, outputs, groups)).astype(np.int8)
        else:
            self.scales = self.random.integers(0, 64, (experts, outputs, groups, 2)).astype(np.uint8)
        factors = (experts, outputs, inputs // 256, FACTORS[kind])
        sizes = np.array([size / 32, inputs**-0.5 / 64])[: FACTORS[kind]]
        self.factors = (self.random.uniform(0.2, 2, factors) * self.random.choice([-1, 1], factors) * sizes).astype(np.float16)
        of_experts = zip(self.values, self.scales, self.factors, strict=True)
        self.weight = np.stack([weights_of(*of_expert, kind) for of_expert in of_experts]).astype(numpy_dtype(dtype))
        others = np.setdiff1d(np.arange(experts), self.chosen)
        self.factors[others] = np.nan
        self.weight[others] = np.nan

    def matrices(self):
        experts, outputs, inputs = self.weight.shape

        def stack(packed, after=None):
            whole = np.concatenate([*packed, *([] if after is None else [np.full_like(packed[0], after)])])
            tensor = self.memory.to_device(whole, stream=self.stream)
            return DeviceTensor(tensor.allocation, shape=(experts * count_tiles(outputs), *whole.shape[1:]), dtype=tensor.dtype)

        stored = self.scales.view(np.uint8).reshape(experts, outputs, -1, 2)
        return SuperBlockTensors(
            kind=self.kind,
            outputs=outputs,
            inputs=inputs,
            values=stack([pack_super_blocks(one, self.kind) for one in self.values]),
            scales=stack([pack_scales(one) for one in stored]),
            factors=stack([pack_factors(one) for one in self.factors], np.nan),
        )


def made(kind):
    return partial(SuperBlockProblem, kind=kind)


@DTYPES
@BIAS
@KINDS
@pytest.mark.parametrize(
    ("shape", "epilogue"), each_once([(shape,) for shape in SHAPES], [*GATED_EPILOGUES, *PLAIN_EPILOGUES, CLAMPED]), ids=str
)
def test_products_into_experts(memory, stream, shape, dtype, with_bias, kind, epilogue):
    check_up(memory, stream, shape, dtype, epilogue, with_bias=with_bias, made=made(kind))


@DTYPES
@KINDS
@pytest.mark.parametrize("shape", [(1, 5, 2, 17, 256), (8, 7, 3, 41, 1280)], ids=str)
def test_outputs_of_no_whole_tile(memory, stream, shape, dtype, kind):
    check_up(memory, stream, shape, dtype, "relu2", with_bias=True, made=made(kind))
    check_down(memory, stream, shape, dtype, with_bias=True, made=made(kind))


@DTYPES
@BIAS
@KINDS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_out_of_experts(memory, stream, shape, dtype, with_bias, kind):
    check_down(memory, stream, shape, dtype, with_bias=with_bias, made=made(kind))


@KINDS
@pytest.mark.parametrize("large_percent", [0, 1000], ids=["large", "small"])
def test_several_tiles_of_a_block(memory, stream, kind, large_percent, monkeypatch):
    if not memory.is_host:
        monkeypatch.setattr(memory, "multiprocessor_count", 2)
    chosen = linear_tiles.linear_tiles
    monkeypatch.setattr(linear_tiles, "linear_tiles", lambda *of: chosen(*of)._replace(large_percent=large_percent))
    linear_tiles.linear_plan.cache_clear()
    expert_plan.cache_clear()
    try:
        check_down(memory, stream, (3, 5, 2, 150, 256), "bfloat16", made=made(kind))
        check_down(memory, stream, (8, 12, 3, 99, 1280), "float16", with_bias=True, made=made(kind))
        check_up(memory, stream, (3, 5, 2, 80, 1280), "bfloat16", "silu_mul", with_bias=True, made=made(kind))
        check_up(memory, stream, (2, 9, 4, 100, 256), "float16", "relu2", made=made(kind))
    finally:
        linear_tiles.linear_plan.cache_clear()
        expert_plan.cache_clear()


@KINDS
def test_the_largest_number_of_choices(memory, stream, kind):
    shape = (MAX_EXPERT_ROWS, 40, MAX_EXPERT_PAIRS // MAX_EXPERT_ROWS, 16, 256)
    check_up(memory, stream, shape, "float16", "silu_mul", made=made(kind))
    check_down(memory, stream, shape, "float16", made=made(kind))


@KINDS
def test_a_row_does_not_depend_on_the_others(memory, stream, kind):
    """Bit for bit, also where another row is not finite, or has an expert for itself that is not."""
    shape = (6, 8, 3, 32, 1280)
    for down in (False, True):
        problem = SuperBlockProblem(memory, stream, shape, "bfloat16", kind=kind, down=down, gated=not down)
        run = problem.run_down if down else partial(problem.run_up, "silu_mul")
        before = run().copy()
        lonely = next(expert for expert in range(8) if (problem.chosen[2:] == expert).any() and not (problem.chosen[1] == expert).any())
        problem.factors[lonely, :16] = np.nan
        problem.x[0] = np.nan
        np.testing.assert_array_equal(run()[1].view(np.uint16), before[1].view(np.uint16))


@KINDS
@DTYPES
def test_matrices_of_a_stack_are_dequantized_bit_for_bit(memory, stream, kind, dtype):
    """From any expert on, several at a time."""
    problem = SuperBlockProblem(memory, stream, (1, 6, 6, 32, 512), dtype, kind=kind)
    packed, whole = problem.matrices(), problem.weight.reshape(-1, 512)
    stack = SuperBlockTensors(**{**vars(packed), "outputs": len(whole)})
    for first, count in ((0, 1), (2, 3), (5, 1)):
        out = memory.to_device(np.full((32 * count, 512), np.nan, numpy_dtype(dtype)), stream=stream)
        packed_dequantize_kernel(out, stack, 32 * first, stream)
        expected = whole[32 * first : 32 * (first + count)]
        np.testing.assert_array_equal(out.numpy().astype(np.float32), expected.astype(np.float32))


def test_plans_have_whole_tiles():
    for kind in VALUES:
        for outputs in (16, 768, 1856, 2880, 14336):
            for has_gate in (False, True):
                plan = expert_plan(outputs, has_gate, 4, "sm_90", 132, kind)
                assert plan.tile_outputs == (16 if has_gate else 32)
                assert (plan.tiles - 1) * plan.tile_outputs < outputs <= plan.tiles * plan.tile_outputs
                assert 1 <= plan.blocks <= min(132, 4 * plan.tiles)
