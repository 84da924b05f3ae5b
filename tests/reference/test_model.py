"""The layers of a decoder in NumPy."""

from __future__ import annotations

import numpy as np

from tests.helpers.assertions import assert_close
from trt_kvcache.model import NormConfig
from trt_kvcache.reference import model
from trt_kvcache.reference.weights import Projection


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).normal(size=shape).astype(np.float32)


def test_rms_norm() -> None:
    x, weight = normal(2, 3, 4), normal(4)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=-1, keepdims=True) + 0.5) * weight
    result = model.rms_norm(x, weight, NormConfig(epsilon=0.5))
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_project() -> None:
    x, weight, bias = normal(2, 3, 4), normal(5, 4), normal(5)
    assert_close(model.project(Projection(weight, None), x), np.einsum("abi,oi->abo", x, weight))
    assert_close(model.project(Projection(weight, bias), x), np.einsum("abi,oi->abo", x, weight) + bias)
