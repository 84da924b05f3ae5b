"""The gated MLP."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.builder.network.parts import Part, StoredWeights, normal
from tests.helpers.assertions import assert_close
from trt_kvcache.builder.network.mlp import mlp
from trt_kvcache.model import MlpConfig

pytestmark = pytest.mark.trt

MakePart = Callable[..., Part]


ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_tanh": lambda x: x / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_the_gate_goes_through_the_activation(part: MakePart, bias: bool, activation: str) -> None:
    sizes = {"gate": (5, 4), "up": (5, 4), "down": (4, 5)}
    weights = {f"{name}__weight": normal(*size, seed=seed) for seed, (name, size) in enumerate(sizes.items())}
    biases = {f"{name}__bias": normal(size[0], seed=9 + seed) for seed, (name, size) in enumerate(sizes.items())}
    config = MlpConfig(intermediate_size=5, activation=activation, bias=bias)
    made, x = part(), normal(2, 3, 4, seed=5)
    y = mlp(made.graph, made.graph.input("x", "float32", (2, 3, 4)), StoredWeights(**weights, **biases), "mlp", config)

    def project(name: str, value: np.ndarray) -> np.ndarray:
        return value @ weights[f"{name}__weight"].T + bias * biases[f"{name}__bias"]

    gate = project("gate", x)
    expected = project("down", ACTIVATIONS[activation](gate) * project("up", x))
    assert_close(made.run(y, x=x), expected)
