"""Positions and key lengths of a step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.builder.network.parts import Part
from trt_kvcache.builder.network.step_lengths import StepLengths, step_lengths

pytestmark = pytest.mark.trt

MakePart = Callable[..., Part]

START = np.array([0, 4, 2], np.int32)
FEED = {"ids": np.zeros((3, 5), np.int32), "start": START}


@pytest.fixture
def made(part: MakePart) -> Part:
    return part()


@pytest.fixture
def lengths(made: Part) -> StepLengths:
    ids, start = made.graph.input("ids", "int32", (-1, -1)), made.graph.input("start", "int32", (-1,))
    return step_lengths(made.graph, tokens=ids, start_index=start)


def test_positions_follow_the_start_index(made: Part, lengths: StepLengths) -> None:
    found = made.run(lengths.position_ids, **FEED)
    assert found.dtype == np.int32
    assert found.tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [2, 3, 4, 5, 6]]


def test_positions_from_the_shape_of_a_hidden_state(made: Part) -> None:
    hidden, start = made.graph.input("hidden", "float32", (-1, -1, 4)), made.graph.input("start", "int32", (-1,))
    found = made.run(step_lengths(made.graph, tokens=hidden, start_index=start).position_ids, hidden=np.zeros((3, 2, 4)), start=START)
    assert found.tolist() == [[0, 1], [4, 5], [2, 3]]


def test_key_lengths_include_the_new_tokens(made: Part, lengths: StepLengths) -> None:
    found = made.run(lengths.key_lengths, **FEED)
    assert (found.dtype, found.tolist()) == (np.int32, [5, 9, 7])


def test_the_start_index_is_the_input_itself(lengths: StepLengths) -> None:
    assert lengths.start_index.name == "start"


def test_positions_in_trees_are_depths(made: Part) -> None:
    """The table has the tokens of slot 0, then those of slot 1; -1 is a chain. Places after its end are of chains."""
    ids, start = made.graph.input("ids", "int32", (-1, -1)), made.graph.input("start", "int32", (-1,))
    depths = made.graph.input("depths", "int32", (4, 3))
    table = np.array([[0, 1, 1], [2, 0, -1], [-1, -1, -1], [7, 7, -1]], np.int32)
    found = step_lengths(made.graph, tokens=ids, start_index=start, depths=depths).position_ids
    assert made.run(found, ids=np.zeros((2, 4), np.int32), start=START[:2], depths=table).tolist() == [[0, 1, 1, 2], [4, 5, 6, 7]]
    assert made.run(found, **FEED, depths=np.full((4, 3), -1, np.int32)).tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [2, 3, 4, 5, 6]]
