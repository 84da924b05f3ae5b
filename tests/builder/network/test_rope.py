"""RoPE in the network: pairs ``(d, d + D / 2)`` are rotated by the angle of their position."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.builder.network.parts import Part, normal
from tests.helpers.models import SMALL
from trt_kvcache.builder.network.rope import apply_rope, cos_sin, rope_tables
from trt_kvcache.model import ModelConfig, rope_table

pytestmark = pytest.mark.trt

MakePart = Callable[..., Part]

MODEL = ModelConfig.from_dict({**SMALL, "head_dim": 16})
MIXER = MODEL.layers[0].mixer
KIND = (MIXER.rope, 16)
POSITIONS = np.array([[0, 1, 2], [6, 7, 8]], np.int32)


def rotated(part: Part, x: np.ndarray) -> np.ndarray:
    tensor = part.graph.input("x", part.graph.dtype, x.shape)
    positions = part.graph.input("positions", "int32", POSITIONS.shape)
    tables = rope_tables(part.graph, MODEL, length=9)
    assert list(tables) == [KIND]
    return part.run(apply_rope(part.graph, "q", tensor, tables[KIND], positions), x=x, positions=POSITIONS)


def expected(x: np.ndarray) -> np.ndarray:
    cos, sin = rope_table(MIXER.rope, 16, 9)
    pairs = (x[..., :8] + 1j * x[..., 8:]) * (cos + 1j * sin)[POSITIONS][:, None]
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def test_each_row_is_rotated_by_its_position(part: MakePart) -> None:
    x = normal(2, 4, 3, 16)  # B, H, s, D
    np.testing.assert_allclose(rotated(part(), x), expected(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_result_is_in_float32(part: MakePart, dtype: str) -> None:
    x = normal(2, 4, 3, 16, dtype=dtype)
    found = rotated(part(dtype), x)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected(x.astype(np.float32)), rtol=1e-5, atol=1e-6)


def test_both_tables_in_one_array() -> None:
    table = cos_sin(KIND, length=9)
    assert (table.shape, table.dtype) == ((9, 2, 8), np.float32)
    for side, each in enumerate(rope_table(MIXER.rope, 16, 9)):
        np.testing.assert_array_equal(table[:, side], each)
