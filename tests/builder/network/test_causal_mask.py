"""The explicit causal mask."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.builder.network.parts import Part
from trt_kvcache.builder.network.causal_mask import causal_mask

pytestmark = pytest.mark.trt

MakePart = Callable[..., Part]


def test_each_token_sees_the_keys_up_to_its_own_position(part: MakePart) -> None:
    made, positions = part(), np.array([[0, 1, 2], [4, 5, 6]], np.int32)
    tensor = made.graph.input("positions", "int32", (-1, -1))
    mask = made.run(causal_mask(made.graph, position_ids=tensor, max_sequence_length=7), positions=positions)
    assert (mask.shape, mask.dtype) == ((2, 1, 3, 7), bool)
    for slot in range(2):
        for token in range(3):
            seen = positions[slot, token] + 1
            assert mask[slot, 0, token].tolist() == [True] * seen + [False] * (7 - seen)
