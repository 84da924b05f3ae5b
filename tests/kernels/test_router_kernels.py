"""Logits of a router and its choices against float64, on the host, the emulated device and a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.kernels.router_kernels import (
    MAX_EXPERTS,
    MAX_ROUTER_ROWS,
    choose_experts_kernel,
    router_is_supported,
    router_logits_kernel,
)
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.model import RouterConfig

#: Rounding of a float32 sum in any order, relative to the sum of absolute values; of a score in float32.
SUM_ROUNDING, SCORE_ROUNDING = 2**-23, 1e-6

#: Rows, experts, inputs: one of each, rows of several blocks, inputs of several passes and with an end in the middle of one.
SHAPES = [(1, 1, 4), (1, 5, 8), (3, 40, 516), (8, 3, 2048), (9, 7, 4100), (20, 64, 64), (MAX_ROUTER_ROWS, 2, 9000)]


@pytest.fixture
def stream(memory):
    return memory.create_stream()


def followed(memory, stream, array, by=np.nan):
    """Return an array on the device, with a row behind its last one that nothing may read."""
    whole = np.concatenate([array, np.full((1, *array.shape[1:]), by, array.dtype)])
    device = memory.to_device(whole, stream=stream)
    return DeviceTensor(device.allocation, shape=array.shape, dtype=device.dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logits(memory, stream, shape, with_bias, dtype):
    rows, experts, inputs = shape
    random = np.random.default_rng(sum(shape))
    x = random.standard_normal((rows, inputs)).astype(numpy_dtype(dtype))
    weight = (random.standard_normal((experts, inputs)) / np.sqrt(inputs)).astype(np.float32)
    bias = random.standard_normal(experts).astype(np.float32) if with_bias else None
    operands = [None if one is None else followed(memory, stream, one) for one in (x, weight, bias)]
    logits = followed(memory, stream, np.full((rows, experts), np.nan, np.float32), by=7)
    router_logits_kernel(*operands, logits, stream)
    wide = x.astype(np.float64), weight.astype(np.float64).T
    expected = wide[0] @ wide[1] + (0 if bias is None else bias)
    bound = (np.abs(wide[0]) @ np.abs(wide[1]) + 1) * SUM_ROUNDING * 8
    np.testing.assert_array_less(np.abs(logits.numpy() - expected), bound)
    behind = DeviceTensor(logits.allocation, shape=(rows + 1, experts), dtype="float32").numpy()[-1]
    np.testing.assert_array_equal(behind, 7)


def choose(memory, stream, router, logits, choice_bias=None, expert_scale=None):
    """Return the experts and weights of rows of logits."""
    rows, count = len(logits), router.experts_per_token
    operands = [None if one is None else followed(memory, stream, one, 9e9) for one in (logits, choice_bias, expert_scale)]
    chosen = followed(memory, stream, np.full((rows, count), -1, np.int32), by=-7)
    weights = followed(memory, stream, np.full((rows, count), np.nan, np.float32), by=7)
    choose_experts_kernel(*operands, chosen, weights, router, stream)
    for tensor, by in ((chosen, -7), (weights, 7)):
        whole = DeviceTensor(tensor.allocation, shape=(rows + 1, count), dtype=tensor.dtype).numpy()
        np.testing.assert_array_equal(whole[-1], by)
    return chosen.numpy(), weights.numpy()


#: Routers of published models, and borders of what the kernel takes.
ROUTERS = {
    "Qwen3-MoE": RouterConfig(num_experts=128, experts_per_token=8, renormalise=True),
    "Mixtral": RouterConfig(num_experts=8, experts_per_token=2, renormalise=True),
    "Nemotron": RouterConfig(
        num_experts=128, experts_per_token=6, scores="sigmoid", choice_bias=True, renormalise=True, sum_epsilon=1e-20, factor=2.5
    ),
    "Gemma 4": RouterConfig(num_experts=128, experts_per_token=8, renormalise=True, norm_epsilon=1e-6, expert_scale=True),
    "all experts": RouterConfig(num_experts=5, experts_per_token=5),
    "one": RouterConfig(num_experts=1, experts_per_token=1, scores="sigmoid"),
    "most": RouterConfig(num_experts=MAX_EXPERTS, experts_per_token=32, renormalise=True, factor=0.5),
    "uneven": RouterConfig(num_experts=97, experts_per_token=3, scores="sigmoid", renormalise=True, sum_epsilon=0.25),
    "DeepSeek-V3": RouterConfig(
        **{"num_experts": 256, "experts_per_token": 8, "scores": "sigmoid", "choice_bias": True, "renormalise": True, "factor": 2.5},
        **{"num_groups": 8, "groups_per_token": 4},
    ),
    "groups of two, of all warps": RouterConfig(num_experts=MAX_EXPERTS, experts_per_token=6, num_groups=256, groups_per_token=3),
    "groups that end within a warp": RouterConfig(num_experts=57, experts_per_token=19, num_groups=3, groups_per_token=1),
    "all groups": RouterConfig(num_experts=40, experts_per_token=11, num_groups=4, groups_per_token=4, renormalise=True),
}


def chosen_experts(router, scores):
    """Return the experts of each row, by loops over its groups."""
    size, found = router.num_experts // router.num_groups, []
    for row in scores.tolist():
        groups = [range(first, first + size) for first in range(0, router.num_experts, size)]
        groups.sort(key=lambda group: -sum(sorted(row[expert] for expert in group)[-2:]))
        allowed = sorted(expert for group in groups[: router.groups_per_token] for expert in group)
        found.append(sorted(allowed, key=lambda expert: -row[expert])[: router.experts_per_token])
    return np.array(found)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("name", list(ROUTERS))
def test_choices(memory, stream, name, rows):
    router = ROUTERS[name]
    random = np.random.default_rng(rows)
    logits = (random.standard_normal((rows, router.num_experts)) * 3).astype(np.float32)
    of_experts = [random.standard_normal(router.num_experts).astype(np.float32) for _ in range(2)]
    bias, scale = of_experts[0] if router.choice_bias else None, of_experts[1] if router.expert_scale else None
    wide = logits.astype(np.float64)
    if router.scores == "softmax":
        scores = np.exp(wide - wide.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
    else:
        scores = 1 / (1 + np.exp(-wide))
    experts = chosen_experts(router, scores + (0 if bias is None else bias))
    factors = np.take_along_axis(scores, experts, axis=1)
    if router.renormalise:
        factors = factors / (factors.sum(axis=1, keepdims=True) + router.sum_epsilon)
    factors = factors * router.factor * (1 if scale is None else scale[experts])
    chosen, weights = choose(memory, stream, router, logits, bias, scale)
    np.testing.assert_array_equal(chosen, experts)
    np.testing.assert_allclose(weights, factors, rtol=SCORE_ROUNDING * 10)


def test_of_equal_scores_the_lower_expert(memory, stream):
    router = RouterConfig(num_experts=70, experts_per_token=5, renormalise=True)
    logits = np.zeros((3, 70), np.float32)
    logits[1, [69, 33, 34]] = 1
    logits[2, :40] = -0.0
    chosen, weights = choose(memory, stream, router, logits)
    assert chosen.tolist() == [[0, 1, 2, 3, 4], [33, 34, 69, 0, 1], [0, 1, 2, 3, 4]]
    np.testing.assert_allclose(weights[[0, 2]], 0.2, rtol=SCORE_ROUNDING)


def test_of_equal_groups_the_lower_one(memory, stream):
    """Groups are compared by two scores: one that is highest does not make its group the best, nor do three."""
    router = RouterConfig(num_experts=40, experts_per_token=4, scores="sigmoid", num_groups=4, groups_per_token=2)
    logits = np.full((3, 40), -1, np.float32)
    logits[1, [9, 15, 16, 25, 26]] = 9, 2, 2, 2, 2
    logits[2, [0, 1, 2, 13, 14, 33, 34]] = 1, 1, 1, 2, 1, 2, 1
    chosen, _ = choose(memory, stream, router, logits)
    assert chosen.tolist() == [[0, 1, 2, 3], [15, 16, 25, 26], [13, 33, 14, 34]]


def test_groups_of_scores_below_zero(memory, stream):
    """Experts of other groups are behind all of the chosen ones."""
    router = RouterConfig(num_experts=36, experts_per_token=12, scores="sigmoid", choice_bias=True, num_groups=3)
    bias = np.repeat(np.array([-9, -7, -8], np.float32), 12)
    chosen, weights = choose(memory, stream, router, np.zeros((2, 36), np.float32), bias)
    assert chosen.tolist() == [[*range(12, 24)]] * 2
    np.testing.assert_allclose(weights, 0.5, rtol=SCORE_ROUNDING)


def test_scores_below_zero(memory, stream):
    router = RouterConfig(num_experts=40, experts_per_token=3, scores="sigmoid", choice_bias=True)
    bias = np.full(40, -10, np.float32)
    bias[[38, 4, 20]] = -7, -8, -9
    chosen, weights = choose(memory, stream, router, np.zeros((1, 40), np.float32), bias)
    assert chosen.tolist() == [[38, 4, 20]]
    np.testing.assert_allclose(weights, 0.5, rtol=SCORE_ROUNDING)


def test_large_logits(memory, stream):
    router = RouterConfig(num_experts=40, experts_per_token=2)
    logits = np.full((1, 40), -400, np.float32)
    logits[0, [7, 3]] = 200, 199
    chosen, weights = choose(memory, stream, router, logits)
    assert chosen.tolist() == [[7, 3]]
    np.testing.assert_allclose(weights, [[1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))]], rtol=SCORE_ROUNDING)


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("groups", [{}, {"num_groups": 3, "groups_per_token": 2}], ids=["", "groups"])
def test_logits_that_are_not_finite_choose_different_experts(memory, stream, value, groups):
    router = RouterConfig(num_experts=33, experts_per_token=22, renormalise=True, **groups)
    with np.errstate(invalid="ignore"):
        chosen, _ = choose(memory, stream, router, np.full((2, 33), value, np.float32))
    assert all(len({*row}) == 22 and min(row) >= 0 and max(row) < 33 for row in chosen.tolist())


def test_routers_of_other_kinds_are_not_supported():
    router = RouterConfig(num_experts=8, experts_per_token=2)
    assert router_is_supported(router, 64, "bfloat16")
    assert not router_is_supported(router, 66, "bfloat16")
    assert not router_is_supported(router, 64, "float32")
    assert router_is_supported(RouterConfig(num_experts=8, experts_per_token=2, num_groups=2), 64, "bfloat16")
    assert not router_is_supported(RouterConfig(num_experts=MAX_EXPERTS + 1, experts_per_token=2), 64, "bfloat16")
