"""The inverse of a unit triangular matrix, block by block."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.builder.network.parts import Part, normal
from tests.helpers.assertions import assert_close
from trt_kvcache.builder.network.unit_triangle import UnitTriangle

pytestmark = pytest.mark.trt


@pytest.mark.parametrize("width", [1, 2, 3, 7, 8, 13])
def test_any_width_up_to_the_largest(part: Callable[..., Part], width: int) -> None:
    made = part()
    a = np.tril(normal(2, 3, width, width), -1)
    inverse = UnitTriangle(13).inverse(made.graph, "layer", made.graph.input("a", "float32", (-1, 3, -1, -1)))
    for found, one in zip(made.run(inverse, a=a).reshape(-1, width, width), a.reshape(-1, width, width), strict=True):
        assert_close(found, np.linalg.inv(np.eye(width) + one))


def test_tokens_that_repeat_lose_no_digits(part: Callable[..., Part]) -> None:
    """With ones below the diagonal, powers of the matrix reach 9e17, and the inverse has elements of 1 and -1 only."""
    made = part()
    a = np.tril(np.ones((1, 1, 64, 64), np.float32), -1)
    inverse = made.run(UnitTriangle(64).inverse(made.graph, "layer", made.graph.input("a", "float32", (-1, 1, -1, -1))), a=a)
    np.testing.assert_array_equal(inverse[0, 0], np.eye(64) - np.eye(64, k=-1))


def test_layers_share_what_joins_blocks(part: Callable[..., Part]) -> None:
    made, triangle = part(), UnitTriangle(8)
    a = made.graph.input("a", "float32", (-1, 1, -1, -1))
    counts = []
    for layer in range(3):
        triangle.inverse(made.graph, f"layer_{layer}", a)
        counts.append(made.graph.network.num_layers)
    assert counts[2] - counts[1] == counts[1] - counts[0] < counts[0]
