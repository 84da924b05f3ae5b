"""Embedding tables: rows of token ids, also where a table is stored as several constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.builder.network.parts import Part, StoredWeights, normal
from trt_kvcache.builder.network import embedding_table
from trt_kvcache.builder.network.embedding_table import look_up, split_table
from trt_kvcache.builder.network.weights import Weights
from trt_kvcache.checkpoint.quantized.rounding import rounded_to_nearest
from trt_kvcache.checkpoint.quantized.weight import QuantizedWeight

pytestmark = pytest.mark.trt

MakePart = Callable[..., Part]
TABLE, ROWS, WIDTH = "model.embed_tokens_per_layer.weight", 7, 4

#: Largest sizes of a constant, and the rows of the constants that they lead to.
LIMITS = [(28, [7]), (27, [6, 1]), (16, [4, 3]), (12, [3, 3, 1]), (11, [2, 2, 2, 1]), (4, [1] * 7)]


class Stored:
    """A checkpoint of one table, in 8 bits or as it is."""

    def __init__(self, table: np.ndarray[Any, Any], *, quantized: bool = False) -> None:
        self.table, self.weight = table, rounded_to_nearest(table, "int8", "float32") if quantized else None

    def quantized_weight(self, name: str) -> QuantizedWeight | None:
        return self.weight

    def tensor(self, name: str) -> np.ndarray[Any, Any]:
        return self.table if self.weight is None else self.weight.dequantized()

    def release(self, name: str) -> None:
        pass


def rows_of(made: Part, weights: Any, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    tables = split_table(made.graph, weights, TABLE, (ROWS, WIDTH))
    return made.run(look_up(made.graph, "rows", tables, made.graph.input("ids", "int32", (-1, -1))), ids=ids)


@pytest.mark.parametrize(("limit", "sizes"), LIMITS)
def test_token_ids_select_rows(part: MakePart, monkeypatch: pytest.MonkeyPatch, limit: int, sizes: list[int]) -> None:
    monkeypatch.setattr(embedding_table, "MAX_ELEMENTS", limit)
    made, table, ids = part(), normal(ROWS, WIDTH), np.array([[6, 0, 3], [5, 3, 1], [2, 4, 6]], np.int32)
    np.testing.assert_array_equal(rows_of(made, Weights(Stored(table), "float32"), ids), table[ids])
    constants = [array for name, array in made.graph.constants.items() if name.endswith(".weight")]
    assert [array.shape for array in constants] == [(size, WIDTH) for size in sizes]
    assert all(np.shares_memory(array, table) for array in constants)


@pytest.mark.parametrize(("limit", "sizes"), LIMITS[:3])
def test_rows_of_a_quantized_table_stay_packed(part: MakePart, monkeypatch: pytest.MonkeyPatch, limit: int, sizes: list[int]) -> None:
    monkeypatch.setattr(embedding_table, "MAX_ELEMENTS", limit)
    made, source, ids = part(), Stored(normal(ROWS, WIDTH), quantized=True), np.array([[6, 0, 3], [5, 3, 1], [2, 4, 6]], np.int32)
    found = rows_of(made, Weights(source, "float32"), ids)
    np.testing.assert_allclose(found, source.tensor(TABLE)[ids], rtol=1e-6)
    values = [array for name, array in made.graph.constants.items() if name.endswith(".values")]
    assert [(array.shape, array.dtype) for array in values] == [((size, WIDTH), np.dtype(np.int8)) for size in sizes]


def test_the_largest_table_of_one_constant() -> None:
    """Gemma 4 E2B's per-layer embedding has more elements."""
    assert embedding_table.MAX_ELEMENTS < 262144 * 35 * 256


def test_a_table_without_parts_is_read_whole(part: MakePart) -> None:
    made, table = part("bfloat16"), normal(ROWS, WIDTH, dtype="bfloat16")
    found = rows_of(made, StoredWeights(**{TABLE.replace(".", "__"): table}), np.array([[6, 1]], np.int32))
    assert found.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(found, table[[[6, 1]]])
