"""The scan of Mamba-2 in chunks, against token by token in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.builder.network.interpreter import interpret
from tests.builder.network.parts import Part, normal
from tests.helpers.assertions import SAME_SUMS, assert_close
from trt_kvcache.builder.network import selective_scan as scan
from trt_kvcache.builder.network.activations import softplus

pytestmark = pytest.mark.trt

SLOTS, HEADS, GROUPS, HEAD_DIM, STATE_SIZE = 2, 6, 2, 5, 3
CHUNK_TOKENS = 4
SHAPES = {
    "x": (-1, -1, HEADS, HEAD_DIM),
    "decay": (-1, -1, HEADS),
    "b": (-1, -1, GROUPS, STATE_SIZE),
    "c": (-1, -1, GROUPS, STATE_SIZE),
    "past": (-1, HEADS, HEAD_DIM, STATE_SIZE),
}


def token_by_token(given: dict[str, np.ndarray[Any, Any]]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    x, decay, b, c, state = (given[name].astype(np.float64) for name in SHAPES)
    group = np.arange(HEADS) * GROUPS // HEADS
    outputs = []
    for token in range(x.shape[1]):
        state = state * np.exp(decay[:, token, :, None, None]) + x[:, token, :, :, None] * b[:, token, group, None]
        outputs.append((state @ c[:, token, group, :, None])[..., 0])
    return np.stack(outputs, 1), state


@pytest.mark.parametrize("width", [1, 2, 4, 5, 8, 9, 23])
def test_any_number_of_chunks(part: Callable[..., Part], monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr(scan, "CHUNK_TOKENS", CHUNK_TOKENS)
    made = part()
    tensors = {name: made.graph.input(name, "float32", shape) for name, shape in SHAPES.items()}
    outputs = scan.selective_scan(made.graph, "scan", scan.ScanInputs(**tensors))
    for tensor in outputs:
        made.graph.network.mark_output(tensor)
    shapes = {name: (SLOTS, *(width if size < 0 else size for size in shape[1:])) for name, shape in SHAPES.items()}
    given = {name: normal(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
    given["decay"] = -np.abs(given["decay"]) * np.array([0.01, 1, 20, 0.1, 50, 3], np.float32)  # heads that forget at once, or hardly
    found = interpret(made.tensorrt, made.graph.network, made.graph.constants, given)
    largest_sum = CHUNK_TOKENS * np.abs(given["decay"]).max()
    tolerance = SAME_SUMS + np.finfo(np.float32).eps * largest_sum  # a weight is the exponential of a difference of two sums
    for tensor, expected in zip(outputs, token_by_token(given), strict=True):
        assert_close(found[tensor.name], expected, tolerance)


def test_softplus_of_small_and_large_elements(part: Callable[..., Part]) -> None:
    made = part()
    x = np.array([-80, -20, -7, -1, 0, 1, 20, 500], np.float32)
    y = made.run(softplus(made.graph, "dt", made.graph.input("x", "float32", (-1,))), x=x)
    np.testing.assert_allclose(y, np.logaddexp(0, x.astype(np.float64)), rtol=1e-6)
