"""Products of a few rows with chosen experts, on the host, the emulated device and a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.kernels import linear_tiles
from trt_kvcache.kernels.expert_kernels import (
    GATED_EPILOGUES,
    MAX_EXPERT_PAIRS,
    MAX_EXPERT_ROWS,
    PLAIN_EPILOGUES,
    expert_down_kernel,
    expert_up_kernel,
)
from trt_kvcache.kernels.linear_tiles import expert_plan
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.model import ClampedSwiGLU

DTYPES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
BIAS = pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])

#: Rounding errors: of a result, half a unit in the last place; of a float32 sum in any order, relative to the sum of absolute values.
ROUNDING, SUM_ROUNDING = {"float16": 2**-11, "bfloat16": 2**-8}, 2**-23

#: With limits that many of the random products exceed.
CLAMPED = ClampedSwiGLU(alpha=1.7, limit=0.8)

#: Rows, experts, experts of a row, outputs, inputs: tiles and steps that end early, one expert for all rows, many that nobody chooses.
SHAPES = [
    *((1, 1, 1, 1, 8), (1, 9, 3, 17, 72), (2, 40, 4, 33, 24), (3, 5, 2, 16, 520), (8, 7, 3, 20, 1032)),
    *((5, 30, 2, 50, 136), (4, 8, 8, 31, 64), (7, 3, 1, 19, 2048)),
]


@pytest.fixture
def stream(memory):
    return memory.create_stream()


@pytest.fixture
def few_multiprocessors(memory, monkeypatch):
    """Launches as for a GPU of 2 multiprocessors: blocks have several tiles."""
    if not memory.is_host:
        monkeypatch.setattr(memory, "multiprocessor_count", 2)


class Problem:
    """Random operands and choices. Experts that nobody has chosen are NaN, as what follows x and the weights; so is ``out``."""

    def __init__(self, memory, stream, shape, dtype, *, with_bias=False, gated=False, down=False):
        rows, experts, choices, outputs, inputs = shape
        self.random, self.dtype, self.memory, self.stream = np.random.default_rng(sum(shape)), dtype, memory, stream
        self.chosen = np.stack([self.random.permutation(experts)[:choices] for _ in range(rows)]).astype(np.int32)
        self.router_weights = self.random.uniform(0.1, 1, (rows, choices)).astype(np.float32)
        self.x = self.numbers(*((rows, choices) if down else (rows,)), inputs)
        self.weight = self.numbers(experts, outputs * (2 if gated else 1), inputs, scale=inputs**-0.5)
        self.bias = self.numbers(*self.weight.shape[:2]) if with_bias else None
        others = np.setdiff1d(np.arange(experts), self.chosen)
        for array in (self.weight, self.bias):
            if array is not None:
                array[others] = np.nan
        self.out = memory.to_device(
            np.full((rows, outputs) if down else (rows, choices, outputs), np.nan, numpy_dtype(dtype)), stream=stream
        )

    def numbers(self, *shape, scale=1.0):
        return (self.random.standard_normal(shape) * scale).astype(numpy_dtype(self.dtype))

    def on_device(self, array):
        if array is None:
            return None
        more = np.full((1, *array.shape[1:]), -1 if array.dtype == np.int32 else np.nan, array.dtype)
        whole = self.memory.to_device(np.concatenate([array, more]), stream=self.stream)
        return DeviceTensor(whole.allocation, shape=array.shape, dtype=whole.dtype)

    def matrices(self):
        return self.on_device(self.weight)

    def run_up(self, epilogue):
        bias, chosen = map(self.on_device, (self.bias, self.chosen))
        expert_up_kernel(self.on_device(self.x), self.matrices(), bias, chosen, self.out, epilogue, self.stream)
        return self.out.numpy()

    def run_down(self):
        of_rows = map(self.on_device, (self.bias, self.chosen, self.router_weights))
        expert_down_kernel(self.on_device(self.x), self.matrices(), *of_rows, self.out, self.stream)
        return self.out.numpy()

    def products(self):
        """Return the products of each row with its experts in float64, and the sums of their absolute values."""
        wide = [None if array is None else array.astype(np.float64) for array in (self.x, self.weight, self.bias)]
        x, weight, bias = wide
        sums = np.empty((*self.chosen.shape, weight.shape[1]))
        sizes = np.empty_like(sums)
        for row, choice in np.ndindex(self.chosen.shape):
            expert = self.chosen[row, choice]
            of_row = x[row] if x.ndim == 2 else x[row, choice]
            added = 0.0 if bias is None else bias[expert]
            sums[row, choice] = np.einsum("oi,i->o", weight[expert], of_row) + added
            sizes[row, choice] = np.einsum("oi,i->o", np.abs(weight[expert]), np.abs(of_row)) + np.abs(added)
        return sums, sizes

    def check(self, found, expected, tolerance):
        error = np.abs(found.astype(np.float64) - expected)
        assert np.all(error <= np.abs(expected) * ROUNDING[self.dtype] * 1.01 + tolerance), error.max()


def check_up(memory, stream, shape, dtype, epilogue, *, with_bias=False, made=Problem):
    has_gate = epilogue == CLAMPED or epilogue in GATED_EPILOGUES
    problem = made(memory, stream, shape, dtype, with_bias=with_bias, gated=has_gate)
    found = problem.run_up(epilogue)
    sums, sizes = problem.products()
    per_sum = shape[-1] * SUM_ROUNDING
    if has_gate:
        (gate, up), (gate_size, up_size) = (np.split(one, 2, axis=2) for one in (sums, sizes))
        if epilogue == CLAMPED:
            gate, up = np.minimum(gate, CLAMPED.limit), np.clip(up, -CLAMPED.limit, CLAMPED.limit) + 1
        sigmoid_input = (
            CLAMPED.alpha * gate
            if epilogue == CLAMPED
            else gate
            if epilogue == "silu_mul"
            else np.sqrt(8 / np.pi) * (gate + 0.044715 * gate**3)
        )
        activated = gate / (1 + np.exp(-sigmoid_input))
        # The slopes are at most 1.13; a few units for the exponential.
        tolerance = per_sum * (1.13 * gate_size * np.abs(up) + np.abs(activated) * up_size) + 2**-20 * np.abs(activated * up)
        expected = activated * up
    elif epilogue == "linear":
        expected, tolerance = sums, per_sum * sizes
    else:
        positive = np.maximum(sums, 0)
        expected, tolerance = positive**2, per_sum * sizes * (2 * positive + per_sum * sizes)
    problem.check(found, expected, tolerance + 2**-25)  # halves of the smallest number of float16


def check_down(memory, stream, shape, dtype, *, with_bias=False, made=Problem):
    problem = made(memory, stream, shape, dtype, with_bias=with_bias, down=True)
    found = problem.run_down()
    sums, sizes = (np.einsum("rc,rco->ro", problem.router_weights.astype(np.float64), one) for one in problem.products())
    problem.check(found, sums, sizes * (shape[-1] + shape[2]) * SUM_ROUNDING + 2**-25)


@DTYPES
@BIAS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("epilogue", [*GATED_EPILOGUES, *PLAIN_EPILOGUES, CLAMPED], ids=str)
def test_products_into_experts(memory, stream, shape, dtype, with_bias, epilogue):
    check_up(memory, stream, shape, dtype, epilogue, with_bias=with_bias)


@DTYPES
@BIAS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_out_of_experts(memory, stream, shape, dtype, with_bias):
    check_down(memory, stream, shape, dtype, with_bias=with_bias)


@DTYPES
@pytest.mark.parametrize("large_percent", [0, 1000], ids=["large", "small"])
@pytest.mark.usefixtures("few_multiprocessors")
def test_several_tiles_of_a_block(memory, stream, dtype, large_percent, monkeypatch):
    chosen = linear_tiles.linear_tiles
    monkeypatch.setattr(linear_tiles, "linear_tiles", lambda *of: chosen(*of)._replace(large_percent=large_percent))
    linear_tiles.linear_plan.cache_clear()
    linear_tiles.expert_plan.cache_clear()
    check_down(memory, stream, (3, 5, 2, 150, 136), dtype)
    check_down(memory, stream, (8, 12, 3, 99, 1096), dtype, with_bias=True)
    check_up(memory, stream, (3, 5, 2, 70, 1032), dtype, "silu_mul", with_bias=True)
    check_up(memory, stream, (2, 9, 4, 100, 72), dtype, "relu2")
    linear_tiles.linear_plan.cache_clear()
    linear_tiles.expert_plan.cache_clear()


def test_plans():
    """Every output has a tile, no block is without one, and blocks read about equal amounts."""
    for outputs in (1, 17, 768, 2880, 14336):
        for has_gate in (False, True):
            for experts in (1, 6, 64):
                plan = expert_plan(outputs, has_gate, experts, "sm_90", 132)
                assert plan.tile_outputs <= (16 if has_gate else 32)
                assert (plan.tiles - 1) * plan.tile_outputs < outputs <= plan.tiles * plan.tile_outputs
                assert 1 <= plan.blocks <= min(132, experts * plan.tiles)
    sizes = [expert_plan(outputs, outputs != 1856, experts, "sm_90", 132) for outputs, experts in ((768, 8), (2880, 4), (1856, 6))]
    assert [(plan.tiles, plan.tile_outputs, plan.blocks) for plan in sizes] == [(48, 16, 132), (192, 15, 132), (64, 29, 132)]


def test_all_rows_have_chosen_the_same_experts(memory, stream, monkeypatch):
    """Then there are fewer tiles than blocks."""
    if not memory.is_host:
        monkeypatch.setattr(memory, "multiprocessor_count", 132)
    for down in (False, True):
        problem = Problem(memory, stream, (8, 5, 2, 40, 72), "float16", down=down)
        problem.chosen[...] = problem.chosen[0]
        found = problem.run_down() if down else problem.run_up("relu2")
        sums, _ = problem.products()
        expected = np.einsum("rc,rco->ro", problem.router_weights, sums) if down else np.maximum(sums, 0) ** 2
        np.testing.assert_allclose(found.astype(np.float64), expected, rtol=1e-3, atol=1e-3)


def test_the_largest_number_of_choices(memory, stream):
    shape = (MAX_EXPERT_ROWS, 40, MAX_EXPERT_PAIRS // MAX_EXPERT_ROWS, 17, 24)
    check_up(memory, stream, shape, "float16", "silu_mul")
    check_down(memory, stream, shape, "float16")


def test_a_row_does_not_depend_on_the_others(memory, stream):
    """Bit for bit, also where another row, or an expert that only another row has chosen, is not finite."""
    shape = (6, 8, 3, 20, 1096)
    problem = Problem(memory, stream, shape, "bfloat16", down=True)
    together = problem.run_down().copy()
    ups = Problem(memory, stream, shape, "bfloat16", gated=True)
    up_together = ups.run_up("silu_mul").copy()
    for one, run, before in ((problem, problem.run_down, together), (ups, lambda: ups.run_up("silu_mul"), up_together)):
        lonely = next(expert for expert in range(8) if (one.chosen[2:] == expert).any() and not (one.chosen[1] == expert).any())
        one.weight[lonely, 3] = np.inf
        one.x[0] = np.nan
        after = run()
        np.testing.assert_array_equal(after[1].view(np.uint16), before[1].view(np.uint16))
    alone = Problem(memory, stream, (1, *shape[1:]), "bfloat16", down=True)
    fresh = Problem(memory, stream, shape, "bfloat16", down=True)
    for name in ("x", "chosen", "router_weights"):
        setattr(alone, name, getattr(fresh, name)[4:5])
    alone.weight = fresh.weight
    np.testing.assert_array_equal(alone.run_down()[0].view(np.uint16), together[4].view(np.uint16))
