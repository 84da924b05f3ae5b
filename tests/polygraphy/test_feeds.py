from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.helpers.assertions import raises
from trt_kvcache.errors import DTypeError, RangeError, ShapeError
from trt_kvcache.polygraphy.feeds import complete_feed, decoding_steps, make_feed, read_feed


def test_a_feed_is_right_padded_and_read_back() -> None:
    feed = make_feed([[5, 6, 7], [], [8]], reset=True)
    assert {name: (array.dtype.name, array.tolist()) for name, array in feed.items()} == {
        "input_ids": ("int32", [[5, 6, 7], [0, 0, 0], [8, 0, 0]]),
        "new_lengths": ("int32", [3, 0, 1]),
        "reset": ("bool", [True]),
    }
    assert read_feed(feed) == ([[5, 6, 7], [], [8]], True)


def test_what_lies_past_a_new_length_is_not_read() -> None:
    feed = make_feed([[5, 6, 7], [8, 9]], reset=False)
    feed["input_ids"][1, 2] = 99
    assert read_feed(feed) == ([[5, 6, 7], [8, 9]], False)


@pytest.mark.parametrize("reset", [True, np.True_, np.array(True), np.array([True]), [True]])
def test_reset_comes_in_any_form(reset: Any) -> None:
    feed = complete_feed({**make_feed([[1]], reset=False), "reset": reset})
    assert np.shape(feed["reset"]) == (1,)
    assert read_feed(feed)[1]


def test_without_reset_it_goes_on() -> None:
    feed = make_feed([[1]], reset=True)
    del feed["reset"]
    assert complete_feed(feed)["reset"].tolist() == [False]


def test_int64_becomes_int32_where_it_fits() -> None:
    feed = complete_feed({"input_ids": np.array([[3]], np.int64), "new_lengths": np.array([1], np.uint64)})
    assert (feed["input_ids"].dtype, feed["new_lengths"].dtype) == (np.int32, np.int32)
    with raises(RangeError, "`input_ids`", expected="values that int32 holds", got="0 to 4294967297"):
        complete_feed({"input_ids": np.array([[0, 2**32 + 1]])})
    with raises(DTypeError, "`input_ids`", expected="int32 or int64", got="float64"):
        complete_feed({"input_ids": np.array([[1.5]])})


def test_arrays_that_disagree_are_refused() -> None:
    feed = make_feed([[1, 2], [3]], reset=False)
    with raises(ShapeError, "`new_lengths`", expected="(2,)", got="(3,)"):
        read_feed({**feed, "new_lengths": np.array([1, 1, 1], np.int32)})
    for length in (-1, 3):
        with raises(RangeError, "`new_lengths`[1]", expected="0 to 2", got=length):
            read_feed({**feed, "new_lengths": np.array([2, length], np.int32)})


@pytest.mark.parametrize("lengths", [[1], [2], [3, 3], [9, 4, 5, 6, 7], [40, 40, 40, 40, 40]])
def test_decoding_steps_run_the_rows_from_their_beginning(lengths):
    rows = [list(range(100 * slot, 100 * slot + length)) for slot, length in enumerate(lengths)]
    prompts, *tokens = decoding_steps(rows)
    assert len(tokens) == min(min(lengths) // 2, 16)
    for slot, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        run = prompt + [step[slot][0] for step in tokens]
        assert prompt
        assert run == row[: len(run)]


def test_prompts_of_decoding_steps_differ_in_length():
    prompts, *_ = decoding_steps([[0] * 40] * 5)
    assert [len(prompt) for prompt in prompts] == [24, 23, 22, 21, 24]


def test_decoding_steps_of_nothing():
    assert decoding_steps([[], [1, 2]]) == [[[], [1]]]


def test_a_feed_continues_unless_it_says_otherwise():
    assert not make_feed([[1]])["reset"][0]
