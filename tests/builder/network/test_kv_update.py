"""New rows are appended to a cache in place."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.builder.network.parts import Part, normal
from trt_kvcache.builder.network.kv_update import update_cache

pytestmark = pytest.mark.trt

MakePart = Callable[..., Part]


def test_rows_are_written_behind_the_start_index(part: MakePart) -> None:
    made, cache, rows, start = part(), normal(3, 2, 7, 4), normal(3, 2, 2, 4, seed=1), np.array([0, 5, 3], np.int32)
    graph = made.graph
    tensors = graph.input("rows", "float32", (-1, 2, -1, 4)), graph.input("start", "int32", (-1,))
    after = update_cache(graph, cache=("past", "present"), shape=(2, 7, 4), rows=tensors[0], start_index=tensors[1])
    expected = cache.copy()
    for slot, first in enumerate(start):
        expected[slot, :, first : first + 2] = rows[slot]
    np.testing.assert_array_equal(made.run(after, past=cache, rows=rows, start=start), expected)


def test_the_cache_is_an_input_and_an_output_of_the_network(part: MakePart) -> None:
    made = part("float16")
    graph = made.graph
    rows, start = graph.input("rows", "float16", (-1, 2, -1, 4)), graph.input("start", "int32", (-1,))
    update_cache(graph, cache=("past", "present"), shape=(2, 7, 4), rows=rows, start_index=start)
    assert [graph.network.get_input(index).name for index in range(graph.network.num_inputs)] == ["rows", "start", "past"]
    assert [graph.network.get_output(index).name for index in range(graph.network.num_outputs)] == ["present"]
    assert tuple(graph.network.get_input(2).shape) == (-1, 2, 7, 4)
