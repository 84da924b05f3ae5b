"""Linear layers with weights ``[out, in]``."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.builder.network.parts import Part, StoredWeights, normal
from tests.helpers.assertions import assert_close
from trt_kvcache.builder.network.linear import linear

pytestmark = pytest.mark.trt

MakePart = Callable[..., Part]


def test_without_a_bias(part: MakePart) -> None:
    made, x, weight = part(), normal(2, 3, 4), normal(5, 4, seed=1)
    y = linear(made.graph, made.graph.input("x", "float32", (2, 3, 4)), StoredWeights(up__weight=weight), "up", bias=False)
    assert_close(made.run(y, x=x), np.einsum("bsi,oi->bso", x, weight))


def test_with_a_bias(part: MakePart) -> None:
    made, x, weight, bias = part(), normal(2, 3, 4), normal(5, 4, seed=1), normal(5, seed=2)
    weights = StoredWeights(up__weight=weight, up__bias=bias)
    y = linear(made.graph, made.graph.input("x", "float32", (2, 3, 4)), weights, "up", bias=True)
    assert_close(made.run(y, x=x), np.einsum("bsi,oi->bso", x, weight) + bias)
