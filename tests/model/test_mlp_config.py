"""Descriptions of routed MLPs: contradictions, and the way through JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.models import model_of
from trt_kvcache.errors import ConfigError
from trt_kvcache.model import ClampedSwiGLU, MlpConfig, ModelConfig, NormConfig, RoutedMlpConfig, RouterConfig

FULL = RoutedMlpConfig(
    router=RouterConfig(
        num_experts=12,
        experts_per_token=3,
        scores="sigmoid",
        renormalise=True,
        sum_epsilon=1e-20,
        factor=2.5,
        bias=True,
        choice_bias=True,
        num_groups=4,
        groups_per_token=2,
        norm_epsilon=1e-5,
        expert_scale=True,
    ),
    expert=MlpConfig(intermediate_size=28, activation="relu2", bias=True, gated=False),
    shared=MlpConfig(intermediate_size=36),
    shared_gate=True,
    branch_norm=NormConfig(epsilon=1e-4, weight_offset=1.0),
)


def test_clamped_swiglu_is_read_back() -> None:
    model = model_of("gpt_oss")
    plain = json.loads(json.dumps(model.to_description()))
    assert ModelConfig.from_description(plain) == model
    assert plain["layer_kinds"][0]["mlp"]["expert"]["activation"] == {"kind": "clamped_swiglu", "alpha": 1.1, "limit": 0.7}


def test_contradictions_of_clamped_swiglu() -> None:
    with pytest.raises(ConfigError, match=r"MlpConfig\.gated: expected True with clamped SwiGLU, got False"):
        MlpConfig(intermediate_size=28, activation=ClampedSwiGLU(alpha=1.0, limit=7.0), gated=False)
    for changes in ({"alpha": 0.0}, {"limit": float("inf")}, {"limit": "7"}):
        with pytest.raises(ConfigError, match=rf"ClampedSwiGLU.{next(iter(changes))}: expected a finite number > 0"):
            ClampedSwiGLU(**{"alpha": 1.0, "limit": 7.0, **changes})


def test_a_factor_of_the_gate_needs_a_gate_of_a_single_mlp() -> None:
    for changes in ({"gated": False}, {"activation": ClampedSwiGLU(alpha=1.0, limit=7.0)}):
        with pytest.raises(ConfigError, match=r"MlpConfig\.gate_multiplier: expected 1 without a gate and with clamped SwiGLU, got 0.5"):
            MlpConfig(intermediate_size=28, gate_multiplier=0.5, **changes)
    for name in ("expert", "shared"):
        with pytest.raises(ConfigError, match=r"RoutedMlpConfig\.expert: expected experts with a gate_multiplier of 1, got another"):
            replace(FULL, **{name: MlpConfig(intermediate_size=28, gate_multiplier=0.5)})


def test_a_description_with_experts_is_read_back() -> None:
    model = model_of("qwen3_moe-dense-window")
    layers = (replace(model.layers[0], mlp=FULL), *model.layers[1:])
    model = replace(model, layers=layers)
    plain = json.loads(json.dumps(model.to_description()))
    assert ModelConfig.from_description(plain) == model
    assert [kind["mlp"].get("kind") for kind in plain["layer_kinds"]] == ["routed", None, "routed"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "RouterConfig.num_experts: expected an integer from 1 to 2147483647, got 0"),
        ({"experts_per_token": 13}, "RouterConfig.experts_per_token: expected an integer from 1 to 12, got 13"),
        ({"scores": "relu"}, "RouterConfig.scores: expected one of softmax, sigmoid, got 'relu'"),
        ({"sum_epsilon": -1e-6}, "RouterConfig.sum_epsilon: expected a finite number > 0, got -1e-06"),
        ({"factor": 0.0}, "RouterConfig.factor: expected a finite number > 0, got 0.0"),
        ({"norm_epsilon": 0.0}, "RouterConfig.norm_epsilon: expected a finite number > 0, got 0.0"),
        ({"num_groups": 5}, "RouterConfig.num_groups: expected groups of 2 or more of 12 experts, got 5"),
        ({"num_groups": 12}, "RouterConfig.num_groups: expected groups of 2 or more of 12 experts, got 12"),
        ({"groups_per_token": 5}, "RouterConfig.groups_per_token: expected an integer from 1 to 4, got 5"),
        ({"groups_per_token": 1, "experts_per_token": 4}, "experts_per_token: expected at most the 3 experts of groups_per_token=1, got 4"),
    ],
)
def test_contradictions_of_a_router(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(FULL.router, **changes)


def test_a_gate_needs_a_shared_expert() -> None:
    with pytest.raises(ConfigError, match=r"RoutedMlpConfig\.shared_gate: expected False without a shared expert, got True"):
        replace(FULL, shared=None)


def test_norms_of_branches_need_a_shared_expert() -> None:
    with pytest.raises(ConfigError, match=r"RoutedMlpConfig\.branch_norm: expected None without a shared expert, got norms"):
        replace(FULL, shared=None, shared_gate=False)
