"""RMSNorm and LayerNorm: in float32, rounded before or after the multiplication with the weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.builder.network.parts import Part, normal
from trt_kvcache.builder.network.norm import norm
from trt_kvcache.checkpoint.decoder_weights import NormWeights
from trt_kvcache.model import NormConfig

pytestmark = pytest.mark.trt

MakePart = Callable[..., Part]


def normed(
    part: Part, x: np.ndarray, weight: np.ndarray, epsilon: float = 0.5, *, bias: np.ndarray | None = None, **options: Any
) -> np.ndarray:
    tensor = part.graph.input("x", part.graph.dtype, x.shape)
    config = NormConfig(epsilon=epsilon, bias=bias is not None, **options)
    return part.run(norm(part.graph, tensor, "norm", NormWeights(weight, bias), config), x=x)


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


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("first", [False, True], ids=["product rounded", "quotient rounded"])
def test_offset_and_weight_are_added_in_float32(part: MakePart, offset: float, first: bool) -> None:
    x, weight = normal(2, 3, 64, dtype="float16"), normal(64, seed=1).astype(np.float16) / np.float16(1000)
    wide = x.astype(np.float32)
    norm = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + np.float32(1e-5))
    norm = norm.astype(np.float16).astype(np.float32) if first else norm
    expected = (norm * (weight.astype(np.float32) + np.float32(offset))).astype(np.float16)
    found = normed(part("float16"), x, weight, epsilon=1e-5, weight_offset=offset, rounds_before_weight=first)
    assert found.dtype == np.float16
    assert np.mean(found == expected) > 0.99  # 1 + weight in float16 is off in a third of the numbers


def test_the_mean_is_not_subtracted(part: MakePart) -> None:
    x, weight = np.full((1, 2, 4), 3, np.float32), np.ones(4, np.float32)
    np.testing.assert_allclose(normed(part(), x, weight, epsilon=1e-30), np.ones((1, 2, 4)))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_layer_norm_subtracts_the_mean_and_rounds_once(part: MakePart, dtype: str, has_bias: bool) -> None:
    x, weight, bias = (
        normal(2, 3, 64, dtype=dtype) + np.ones((), dtype) * 3,
        normal(64, dtype=dtype, seed=1),
        normal(64, dtype=dtype, seed=2),
    )
    wide = x.astype(np.float64)
    centered = wide - wide.mean(axis=-1, keepdims=True)
    expected = centered / np.sqrt(np.mean(centered**2, axis=-1, keepdims=True) + 0.5) * weight.astype(np.float64)
    expected += bias.astype(np.float64) * has_bias
    found = normed(part(dtype), x, weight, bias=bias if has_bias else None, centered=True, rounds_before_weight=False)
    assert found.dtype == np.dtype(dtype)
    np.testing.assert_allclose(found, expected, rtol={"float32": 1e-5, "float16": 1e-3}[dtype], atol=1e-5)
