"""The choice of experts, against loops over tokens and experts that say it in other words."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.helpers.assertions import assert_close
from trt_kvcache.model import RouterConfig
from trt_kvcache.reference.router import route

#: Of 8 experts.
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {"experts_per_token": 3},
    "renormalised": {"experts_per_token": 2, "renormalise": True},
    "one": {"experts_per_token": 1, "renormalise": True},
    "all": {"experts_per_token": 8},
    "sigmoid": {"experts_per_token": 3, "scores": "sigmoid", "renormalise": True, "sum_epsilon": 0.25, "factor": 2.5},
    "scales of experts": {"experts_per_token": 3, "renormalise": True, "factor": 1.5, "expert_scale": True},
    "choice by a bias": {"experts_per_token": 2, "scores": "sigmoid", "choice_bias": True},
    "groups": {"experts_per_token": 3, "num_groups": 4, "groups_per_token": 2},
    "groups by a bias": {"experts_per_token": 2, "scores": "sigmoid", "choice_bias": True, "num_groups": 2, "groups_per_token": 1},
}


def router_of(name: str) -> RouterConfig:
    return RouterConfig(num_experts=8, **ROUTERS[name])


def inputs_of(router: RouterConfig) -> tuple[Any, Any, Any]:
    """Return logits, a bias of the choice and scales of experts, or None."""
    random = np.random.default_rng(7)
    logits = (3 * random.standard_normal((50, router.num_experts))).astype(np.float32)
    of_experts = [random.standard_normal(router.num_experts).astype(np.float32) for _ in range(2)]
    return logits, of_experts[0] if router.choice_bias else None, of_experts[1] if router.expert_scale else None


def in_loops(router: RouterConfig, logits: Any, bias: Any, scale: Any) -> dict[int, float]:
    """Return the weight of each chosen expert of one token."""
    total = sum(math.exp(logit) for logit in logits.tolist())
    scores = [math.exp(logit) / total if router.scores == "softmax" else 1 / (1 + math.exp(-logit)) for logit in logits.tolist()]
    chosen_by = [score + (0 if bias is None else float(bias[expert])) for expert, score in enumerate(scores)]
    size = router.num_experts // router.num_groups
    groups = [range(first, first + size) for first in range(0, router.num_experts, size)]
    if router.num_groups > 1:
        groups.sort(key=lambda group: -sum(sorted(chosen_by[expert] for expert in group)[-2:]))
    allowed = [expert for group in groups[: router.groups_per_token] for expert in group]
    chosen = sorted(allowed, key=lambda expert: -chosen_by[expert])[: router.experts_per_token]
    divisor = sum(scores[expert] for expert in chosen) + router.sum_epsilon if router.renormalise else 1
    return {expert: router.factor * scores[expert] / divisor * (1 if scale is None else float(scale[expert])) for expert in chosen}


@pytest.mark.parametrize("name", ROUTERS)
def test_experts_and_weights(name: str) -> None:
    router = router_of(name)
    logits, bias, scale = inputs_of(router)
    experts, weights = route(router, logits, bias, scale)
    assert experts.shape == weights.shape == (50, router.experts_per_token)
    for row, chosen, found in zip(logits, experts.tolist(), weights, strict=True):
        expected = in_loops(router, row, bias, scale)
        assert chosen == list(expected)
        assert_close(found, np.array([*expected.values()], np.float32))


def test_the_first_of_equal_experts_is_chosen() -> None:
    experts, weights = route(RouterConfig(num_experts=5, experts_per_token=3), np.zeros((2, 5), np.float32), None)
    assert experts.tolist() == [[0, 1, 2]] * 2
    assert_close(weights, np.full((2, 3), 0.2, np.float32))
