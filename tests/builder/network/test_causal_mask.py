"""The explicit masks, causal and with windows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.builder.network.parts import Part
from trt_kvcache.builder.network.causal_mask import causal_masks

pytestmark = pytest.mark.trt

MakePart = Callable[..., Part]


def test_each_token_sees_the_keys_up_to_its_own_position(part: MakePart) -> None:
    made, positions = part(), np.array([[0, 1, 2], [4, 5, 6]], np.int32)
    tensor = made.graph.input("positions", "int32", (-1, -1))
    masks = causal_masks(made.graph, position_ids=tensor, max_sequence_length=7, windows=[None, None])
    mask = made.run(masks[None], positions=positions)
    assert (mask.shape, mask.dtype) == ((2, 1, 3, 7), bool)
    for slot in range(2):
        for token in range(3):
            seen = positions[slot, token] + 1
            assert mask[slot, 0, token].tolist() == [True] * seen + [False] * (7 - seen)


@pytest.mark.parametrize("window", [1, 3, 6])
def test_a_window_hides_what_is_before_it(part: MakePart, window: int) -> None:
    made, positions = part(), np.array([[0, 1, 2], [4, 5, 6]], np.int32)
    tensor = made.graph.input("positions", "int32", (-1, -1))
    masks = causal_masks(made.graph, position_ids=tensor, max_sequence_length=7, windows=[window, 2, window])
    assert list(masks) == [window, 2]
    mask = made.run(masks[window], positions=positions)
    assert (mask.shape, mask.dtype) == ((2, 1, 3, 7), bool)
    for slot in range(2):
        for token in range(3):
            seen = [key for key in range(7) if mask[slot, 0, token, key]]
            own = positions[slot, token]
            assert seen == list(range(max(own - window + 1, 0), own + 1))
