"""RMSNorm: the norm in float32, rounded before the multiplication with the weight."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.builder.network.parts import Part, StoredWeights, normal
from trt_kvcache.builder.network.rms_norm import rms_norm

pytestmark = pytest.mark.trt

MakePart = Callable[..., Part]


def normed(part: Part, x: np.ndarray, weight: np.ndarray, epsilon: float = 0.5) -> np.ndarray:
    tensor = part.graph.input("x", part.graph.dtype, x.shape)
    return part.run(rms_norm(part.graph, tensor, StoredWeights(norm__weight=weight), "norm", epsilon=epsilon), x=x)


@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 3, 4, 5), (3, 5)])
def test_values_are_those_of_the_definition(part: MakePart, shape: tuple[int, ...]) -> None:
    x, weight = normal(*shape), normal(5, seed=1)
    expected = x / np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True) + 0.5) * weight
    np.testing.assert_allclose(normed(part(), x, weight), expected, rtol=1e-6)


def test_the_norm_is_rounded_before_the_weight(part: MakePart) -> None:
    x, weight = normal(2, 3, 64, dtype="float16"), normal(64, dtype="float16", seed=1)
    wide = x.astype(np.float32)
    norm = (wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + np.float32(1e-5))).astype(np.float16)
    found = normed(part("float16"), x, weight, epsilon=1e-5)
    assert found.dtype == np.float16
    assert np.mean(found == norm * weight) > 0.99  # a sum in float32 may fall on the other side of a tie


def test_the_mean_is_not_subtracted(part: MakePart) -> None:
    x, weight = np.full((1, 2, 4), 3, np.float32), np.ones(4, np.float32)
    np.testing.assert_allclose(normed(part(), x, weight, epsilon=0.0), np.ones((1, 2, 4)))
