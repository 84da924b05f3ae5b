"""Products of a few rows with packed weights of chosen experts, on the host, the emulated device and a GPU."""

from __future__ import annotations

from functools import partial

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.packed_arrays import FLOAT8, pack_rows, pack_tiles, pack_values
from tests.kernels.test_expert_kernels import BIAS, CLAMPED, DTYPES, Problem, check_down, check_up
from tests.sweeps import each_once
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.kernels import linear_tiles
from trt_kvcache.kernels.expert_kernels import GATED_EPILOGUES, MAX_EXPERT_PAIRS, MAX_EXPERT_ROWS, PLAIN_EPILOGUES
from trt_kvcache.kernels.linear_tiles import expert_plan
from trt_kvcache.kernels.nvfp4_scales import kernel_factors_of, nvfp4_scales
from trt_kvcache.kernels.packed_layout import MIDDLES, NVFP4_GROUPS, ONE_GROUP, count_groups, count_tiles, groups_of
from trt_kvcache.kernels.packed_linear_kernels import packed_dequantize_kernel
from trt_kvcache.kernels.packed_tensors import PackedTensors
from trt_kvcache.memory.tensor import DeviceTensor

#: Kind, dtype of scales, group shift, and whether there are zero points.
FORMATS = {
    "mxfp4": ("e2m1", "uint8", 0, False),
    "int4": ("int4", "float16", 0, False),
    "int4, zero points": ("int4", "float32", 2, True),
    "int8": ("int8", "float16", ONE_GROUP, False),
    "int8, zero points": ("int8", "float32", 1, True),
    "fp8": ("e4m3", "float16", ONE_GROUP, False),
    "fp8, blocks": ("e4m3", "float32", 2, False),
    "nvfp4": ("e2m1", "float8_e4m3fn", NVFP4_GROUPS, False),
}

every_format = pytest.mark.parametrize("format_", FORMATS.values(), ids=FORMATS)

#: Rows, experts, experts of a row, outputs (with a gate, whole tiles), inputs: fragments, groups and steps of all warps that end early.
SHAPES = [(1, 1, 1, 16, 8), (1, 9, 3, 48, 72), (2, 40, 4, 16, 24), (8, 7, 3, 32, 1032), (5, 12, 2, 64, 136), (7, 3, 1, 16, 2056)]


@pytest.fixture
def stream(memory):
    return memory.create_stream()


class PackedProblem(Problem):
    """Random packed weights of experts. Scales of those that nobody has chosen, and of what follows the weights, are NaN."""

    def __init__(self, memory, stream, shape, dtype, *, format_, **options):
        super().__init__(memory, stream, shape, dtype, **options)
        self.kind, scale_dtype, self.shift, has_zero_points = format_
        self.shares_scales = format_ == FORMATS["fp8, blocks"]
        experts, outputs, inputs = self.weight.shape
        groups = count_groups(inputs, self.shift)
        low, high = {"int4": (0, 16), "int8": (-128, 128), "e2m1": (0, 16), "e4m3": (0, 448)}[self.kind]
        integer = np.int8 if self.kind == "int8" else np.uint8
        if self.kind == "e4m3":
            self.values = self.random.choice(FLOAT8, self.weight.shape)
        else:
            self.values = self.random.integers(low, high, self.weight.shape).astype(integer)
        of_groups = (experts, outputs, groups)
        self.factors = None
        if scale_dtype == "float8_e4m3fn":
            tiles = (experts, count_tiles(outputs))
            high = self.random.uniform(0.002, 0.02, tiles) / inputs**0.5
            self.factors = np.stack([high, high * self.random.uniform(-1, 1, tiles) * 2**-25], axis=2)
            self.factors = self.factors.astype(np.float32)
            self.scales = self.random.choice(FLOAT8[np.abs(FLOAT8.astype(np.float32)) < 60], of_groups)
            of_rows = np.repeat(self.factors, 16, axis=1)[:, :outputs]
            real = nvfp4_scales(self.scales, (of_rows[..., :1], of_rows[..., 1:]))
            values, nan = self.values.view(ml_dtypes.float4_e2m1fn).astype(np.float32), np.nan
        elif self.kind == "e2m1":
            middle = 124 - int(np.log2(inputs) / 2)
            self.scales = self.random.integers(middle - 2, middle + 2, of_groups).astype(np.uint8)
            real, nan = self.scales.view(ml_dtypes.float8_e8m0fnu), 255
            values = self.values.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        else:
            size = inputs**-0.5 / high
            self.scales = (self.random.uniform(0.2, 2, of_groups) * self.random.choice([-1, 1], of_groups) * size).astype(
                numpy_dtype(scale_dtype)
            )
            if self.shares_scales:
                self.scales = np.repeat(self.scales[:, ::16], 16, axis=1)[:, :outputs]
            real, nan = self.scales, np.nan
            values = self.values.astype(np.float32)
        self.zeros = self.random.integers(low, high, of_groups).astype(integer) if has_zero_points else None
        group = groups_of(inputs, self.shift)
        middles = MIDDLES[self.kind] if self.zeros is None else self.zeros.astype(np.float32)[:, :, group]
        self.weight = ((values - middles) * real.astype(np.float32)[:, :, group]).astype(numpy_dtype(dtype))
        self.nan = nan
        others = np.setdiff1d(np.arange(experts), self.chosen)
        self.scales[others] = nan
        self.weight[others] = np.nan

    def matrices(self):
        experts, outputs, inputs = self.weight.shape
        groups = self.scales.shape[2]

        def stack(packed, after=None):
            whole = np.concatenate([*packed, *([] if after is None else [np.full_like(packed[0], after)])])
            tensor = self.memory.to_device(whole, stream=self.stream)
            return DeviceTensor(tensor.allocation, shape=(experts * count_tiles(outputs), *whole.shape[1:]), dtype=tensor.dtype)

        return PackedTensors(
            kind=self.kind,
            outputs=outputs,
            inputs=inputs,
            group_shift=self.shift,
            values=stack([pack_values(one, self.kind) for one in self.values]),
            scales=stack([(pack_tiles if self.shares_scales else pack_rows)(one, groups) for one in self.scales], self.nan),
            zero_points=None if self.zeros is None else stack([pack_rows(one, groups) for one in self.zeros]),
            **({} if self.factors is None else self._factors()),
        )

    def _factors(self):
        whole = self.factors.reshape(-1, 2)
        factors, of_kernels = (
            self.memory.to_device(one, stream=self.stream) for one in (whole, kernel_factors_of(whole.tolist(), self.dtype))
        )
        return {"factors": factors, "kernel_factors": of_kernels}


def made(format_):
    return partial(PackedProblem, format_=format_)


@DTYPES
@BIAS
@every_format
@pytest.mark.parametrize(
    ("shape", "epilogue"), each_once([(shape,) for shape in SHAPES], [*GATED_EPILOGUES, *PLAIN_EPILOGUES, CLAMPED]), ids=str
)
def test_products_into_experts(memory, stream, shape, dtype, with_bias, format_, epilogue):
    check_up(memory, stream, shape, dtype, epilogue, with_bias=with_bias, made=made(format_))


@DTYPES
@every_format
@pytest.mark.parametrize("shape", [(1, 5, 2, 17, 64), (8, 7, 3, 41, 1032)], ids=str)
def test_outputs_of_no_whole_tile(memory, stream, shape, dtype, format_):
    check_up(memory, stream, shape, dtype, "relu2", with_bias=True, made=made(format_))
    check_down(memory, stream, shape, dtype, with_bias=True, made=made(format_))


@DTYPES
@BIAS
@every_format
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_out_of_experts(memory, stream, shape, dtype, with_bias, format_):
    check_down(memory, stream, shape, dtype, with_bias=with_bias, made=made(format_))


@every_format
@pytest.mark.parametrize("large_percent", [0, 1000], ids=["large", "small"])
def test_several_tiles_of_a_block(memory, stream, format_, large_percent, monkeypatch):
    if not memory.is_host:
        monkeypatch.setattr(memory, "multiprocessor_count", 2)
    chosen = linear_tiles.linear_tiles
    monkeypatch.setattr(linear_tiles, "linear_tiles", lambda *of: chosen(*of)._replace(large_percent=large_percent))
    linear_tiles.linear_plan.cache_clear()
    expert_plan.cache_clear()
    try:
        check_down(memory, stream, (3, 5, 2, 150, 136), "bfloat16", made=made(format_))
        check_down(memory, stream, (8, 12, 3, 99, 1096), "float16", with_bias=True, made=made(format_))
        check_up(memory, stream, (3, 5, 2, 80, 1032), "bfloat16", "silu_mul", with_bias=True, made=made(format_))
        check_up(memory, stream, (2, 9, 4, 100, 72), "float16", "relu2", made=made(format_))
    finally:
        linear_tiles.linear_plan.cache_clear()
        expert_plan.cache_clear()


@every_format
def test_the_largest_number_of_choices(memory, stream, format_):
    shape = (MAX_EXPERT_ROWS, 40, MAX_EXPERT_PAIRS // MAX_EXPERT_ROWS, 16, 64)
    check_up(memory, stream, shape, "float16", "silu_mul", made=made(format_))
    check_down(memory, stream, shape, "float16", made=made(format_))


@every_format
def test_a_row_does_not_depend_on_the_others(memory, stream, format_):
    """Bit for bit, also where another row is not finite, or has an expert for itself that is not."""
    shape = (6, 8, 3, 32, 1096)
    for down in (False, True):
        problem = PackedProblem(memory, stream, shape, "bfloat16", format_=format_, down=down, gated=not down)
        run = problem.run_down if down else partial(problem.run_up, "silu_mul")
        before = run().copy()
        lonely = next(expert for expert in range(8) if (problem.chosen[2:] == expert).any() and not (problem.chosen[1] == expert).any())
        problem.scales[lonely, :16] = problem.nan
        problem.x[0] = np.nan
        np.testing.assert_array_equal(run()[1].view(np.uint16), before[1].view(np.uint16))


@DTYPES
def test_every_value_of_mxfp4_bit_for_bit(memory, stream, dtype):
    """With every scale: rounded once, to infinity and to subnormal numbers too."""
    values = np.tile(np.arange(16, dtype=np.uint8), (16, 2 * 255))
    scales = np.tile(np.arange(255, dtype=np.uint8), (16, 1))
    inputs, groups = values.shape[1], count_groups(values.shape[1], 0)
    packed = PackedTensors(
        kind="e2m1",
        outputs=16,
        inputs=inputs,
        group_shift=0,
        values=memory.to_device(pack_values(values, "e2m1"), stream=stream),
        scales=memory.to_device(pack_rows(scales, groups), stream=stream),
        zero_points=None,
    )
    out = memory.to_device(np.full((16, inputs), np.nan, numpy_dtype(dtype)), stream=stream)
    packed_dequantize_kernel(out, packed, 0, stream)
    real = values.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * np.repeat(2.0 ** (scales.astype(np.float64) - 127), 32, axis=1)
    with np.errstate(over="ignore"):
        expected = real.astype(np.float32).astype(numpy_dtype(dtype))
    np.testing.assert_array_equal(out.numpy().view(np.uint16), expected.view(np.uint16))


def test_plans_have_whole_tiles():
    for kind in ("int4", "int8", "e2m1", "e4m3"):
        for outputs in (16, 768, 1856, 2880, 14336):
            for has_gate in (False, True):
                plan = expert_plan(outputs, has_gate, 4, "sm_90", 132, kind)
                assert plan.tile_outputs == (16 if has_gate else 32)
                assert (plan.tiles - 1) * plan.tile_outputs < outputs <= plan.tiles * plan.tile_outputs
                assert 1 <= plan.blocks <= min(132, 4 * plan.tiles)
