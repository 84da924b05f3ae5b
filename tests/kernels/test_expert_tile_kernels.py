"""Products of the rows of a prompt with chosen experts, on the host, the emulated device and a GPU."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tests.kernels.test_expert_kernels import BIAS, CLAMPED, DTYPES, SUM_ROUNDING, Problem, check_up
from tests.kernels.test_packed_expert_kernels import FORMATS, PackedProblem, every_format
from tests.sweeps import each_once
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.kernels.expert_kernels import GATED_EPILOGUES, PLAIN_EPILOGUES
from trt_kvcache.kernels.expert_order_kernels import ROW_TILE_WIDTH, count_row_tiles, sort_by_expert_kernel, weighted_sums_kernel
from trt_kvcache.kernels.expert_tile_kernels import expert_tiles_down_kernel, expert_tiles_up_kernel, packed_tiles_kernel
from trt_kvcache.kernels.linear_tiles import TILED_ROWS

#: Rows, experts, experts of a row, outputs, inputs: row tiles, outputs of a block and stages that end early, experts without rows.
SHAPES = [
    *((1, 9, 3, 16, 72), (9, 2, 1, 48, 24), (70, 2, 2, 16, 136), (33, 40, 4, 32, 264)),
    *((150, 3, 1, 272, 72), (12, 5, 5, 144, 392)),
]


@pytest.fixture
def stream(memory):
    return memory.create_stream()


class Tiled:
    """Runs the kernels for many rows where its base class runs those for few; results are in the order of pairs."""

    def sorted(self):
        pairs, experts = self.chosen.size, len(self.weight)
        order = self.on_device(np.full(pairs, -1, np.int32))
        row_tiles = self.on_device(np.full((count_row_tiles(pairs, experts), ROW_TILE_WIDTH), -1, np.int32))
        sort_by_expert_kernel(self.on_device(self.chosen), order, row_tiles, experts, self.stream)
        return order, row_tiles

    def run_up(self, epilogue):
        order, row_tiles = self.sorted()
        rows, choices, width = self.out.shape
        out = self.out.reshape(rows * choices, width)
        expert_tiles_up_kernel(
            self.on_device(self.x), self.matrices(), self.on_device(self.bias), order, row_tiles, out, epilogue, self.stream
        )
        found = out.numpy()
        in_pairs = np.empty_like(found)
        in_pairs[order.numpy()] = found
        return in_pairs.reshape(rows, choices, width)

    def run_down(self):
        order, row_tiles = self.sorted()
        rows, choices, inputs = self.x.shape
        products = self.on_device(np.full((rows * choices, self.out.shape[1]), np.nan, numpy_dtype(self.dtype)))
        x = self.on_device(self.x.reshape(rows * choices, inputs)[order.numpy()])
        expert_tiles_down_kernel(x, self.matrices(), self.on_device(self.bias), order, row_tiles, products, self.stream)
        whole = products.reshape(rows, choices, self.out.shape[1])
        weighted_sums_kernel(whole, self.on_device(self.router_weights), self.out, self.stream)
        return self.out.numpy()


class DenseTiled(Tiled, Problem):
    pass


class PackedTiled(Tiled, PackedProblem):
    pass


def of_format(format_):
    return partial(PackedTiled, format_=format_)


def check_down_of(memory, stream, shape, dtype, *, with_bias=False, made=DenseTiled):
    """As for few rows, but a product is rounded before it is added."""
    problem = made(memory, stream, shape, dtype, with_bias=with_bias, down=True)
    found = problem.run_down()
    sums, sizes = problem.products()
    weights = problem.router_weights.astype(np.float64)
    rounded = np.abs(sums) * {"float16": 2**-11, "bfloat16": 2**-8}[dtype] + sizes * (shape[-1] + shape[2]) * SUM_ROUNDING + 2**-25
    problem.check(found, np.einsum("rc,rco->ro", weights, sums), np.einsum("rc,rco->ro", weights, rounded * 1.01) + 2**-24)


@DTYPES
@BIAS
@pytest.mark.parametrize(
    ("shape", "epilogue"), each_once([(shape,) for shape in SHAPES], [*GATED_EPILOGUES, *PLAIN_EPILOGUES, CLAMPED]), ids=str
)
def test_products_into_experts(memory, stream, shape, dtype, with_bias, epilogue):
    check_up(memory, stream, shape, dtype, epilogue, with_bias=with_bias, made=DenseTiled)


@DTYPES
@BIAS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_out_of_experts(memory, stream, shape, dtype, with_bias):
    check_down_of(memory, stream, shape, dtype, with_bias=with_bias)


@DTYPES
@BIAS
@every_format
@pytest.mark.parametrize(
    ("shape", "epilogue"), each_once([(shape,) for shape in SHAPES], [*GATED_EPILOGUES, *PLAIN_EPILOGUES, CLAMPED]), ids=str
)
def test_packed_products_into_experts(memory, stream, shape, dtype, with_bias, format_, epilogue):
    check_up(memory, stream, shape, dtype, epilogue, with_bias=with_bias, made=of_format(format_))


@DTYPES
@BIAS
@every_format
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_products_out_of_experts(memory, stream, shape, dtype, with_bias, format_):
    check_down_of(memory, stream, shape, dtype, with_bias=with_bias, made=of_format(format_))


@DTYPES
@pytest.mark.parametrize("shape", [(20, 3, 2, 17, 64), (66, 3, 1, 41, 200)], ids=str)
def test_outputs_of_no_whole_tile(memory, stream, shape, dtype):
    check_up(memory, stream, shape, dtype, "silu_mul", with_bias=True, made=DenseTiled)
    check_up(memory, stream, shape, dtype, "relu2", with_bias=True, made=of_format(FORMATS["int4"]))


@pytest.mark.parametrize(
    ("rows", "experts", "choices"), [(1, 1, 1), (3, 200, 5), (64, 2, 1), (65, 2, 2), (700, 4, 3), (1000, 3, 1), (256, 128, 8)]
)
def test_order_and_row_tiles(memory, stream, rows, experts, choices):
    """Each pair is in one row tile of its expert, those of an expert in order; tiles of one expert differ by less than their number."""
    random = np.random.default_rng(rows)
    chosen = np.stack([random.permutation(experts)[:choices] for _ in range(rows)]).astype(np.int32)
    if experts > 2:
        chosen[chosen == 1] = experts  # nobody has chosen expert 1
        experts += 1
    pairs = chosen.size
    order = memory.to_device(np.full(pairs, -1, np.int32), stream=stream)
    tiles = memory.to_device(np.full((count_row_tiles(pairs, experts), ROW_TILE_WIDTH), -1, np.int32), stream=stream)
    sort_by_expert_kernel(memory.to_device(chosen, stream=stream), order, tiles, experts, stream)
    np.testing.assert_array_equal(order.numpy(), np.argsort(chosen.reshape(-1), kind="stable"))
    used = tiles.numpy()[tiles.numpy()[:, 2] != 0]
    assert used[:, 2].max() <= TILED_ROWS
    np.testing.assert_array_equal(used[:, 1], np.cumsum(used[:, 2]) - used[:, 2])
    assert used[:, 2].sum() == pairs
    counts = np.bincount(chosen.reshape(-1), minlength=experts)
    for expert, count in enumerate(counts):
        of_expert = used[used[:, 0] == expert]
        assert len(of_expert) == -(-count // TILED_ROWS)
        assert of_expert[:, 2].sum() == count
        for _, first, length, _ in of_expert:
            assert (chosen.reshape(-1)[order.numpy()[first : first + length]] == expert).all()
        assert not count or np.ptp(of_expert[:, 2]) < len(of_expert)


@every_format
@BIAS
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(17, 48, 72), (130, 272, 264), (64, 20, 136)])
def test_products_with_one_packed_matrix(memory, stream, format_, rows, outputs, inputs, with_bias):
    problem = PackedProblem(memory, stream, (rows, 1, 1, outputs, inputs), "bfloat16", format_=format_, with_bias=with_bias)
    bias = None if problem.bias is None else problem.on_device(problem.bias[0])
    out = problem.out.reshape(rows, outputs)
    packed_tiles_kernel(problem.on_device(problem.x), problem.matrices(), bias, out, stream)
    sums, sizes = problem.products()
    problem.check(out.numpy(), sums[:, 0], sizes[:, 0] * inputs * SUM_ROUNDING + 2**-25)


@pytest.mark.parametrize("made", [DenseTiled, of_format(FORMATS["mxfp4"])], ids=["16 bits", "mxfp4"])
def test_a_row_does_not_depend_on_the_others(memory, stream, made):
    """Bit for bit, also where another row, or an expert that only another row has chosen, is not finite."""
    for down in (False, True):
        problem = made(memory, stream, (90, 4, 2, 32, 200), "bfloat16", down=down, gated=not down)
        run = problem.run_down if down else partial(problem.run_up, "silu_mul")
        before = run().copy()
        expert = problem.chosen[0, 0]
        others = ~(problem.chosen == expert).any(axis=1)
        others[0] = False
        if isinstance(problem, PackedProblem):
            problem.scales[expert] = problem.nan
        else:
            problem.weight[expert] = np.inf
        problem.x[0] = np.nan
        after = run()
        assert others.any()
        np.testing.assert_array_equal(after[others].view(np.uint16), before[others].view(np.uint16))
