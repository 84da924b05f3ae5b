"""The gated MLP."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.builder.network.parts import Part, StoredWeights, normal
from trt_kvcache.builder.network.mlp import mlp

pytestmark = pytest.mark.trt

MakePart = Callable[..., Part]


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_the_gate_goes_through_silu(part: MakePart, bias: bool) -> None:
    sizes = {"gate": (5, 4), "up": (5, 4), "down": (4, 5)}
    weights = {f"mlp__{name}_proj__weight": normal(*size, seed=seed) for seed, (name, size) in enumerate(sizes.items())}
    biases = {f"mlp__{name}_proj__bias": normal(size[0], seed=9 + seed) for seed, (name, size) in enumerate(sizes.items())}
    made, x = part(), normal(2, 3, 4, seed=5)
    y = mlp(made.graph, made.graph.input("x", "float32", (2, 3, 4)), StoredWeights(**weights, **biases), "mlp", bias=bias)

    def project(name: str, value: np.ndarray) -> np.ndarray:
        return value @ weights[f"mlp__{name}_proj__weight"].T + bias * biases[f"mlp__{name}_proj__bias"]

    gate = project("gate", x)
    expected = project("down", gate / (1 + np.exp(-gate)) * project("up", x))
    np.testing.assert_allclose(made.run(y, x=x), expected, rtol=1e-5, atol=1e-5)
