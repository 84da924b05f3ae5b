"""Token ids as arrays, and how much of a prompt can be reused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trt_kvcache.errors import DTypeError, KVCacheError, RangeError, ShapeError
from trt_kvcache.generation.token_ids import common_prefix, reusable_tokens, token_array


@pytest.mark.parametrize(
    "tokens",
    [[3, 1, 2], (3, 1, 2), np.array([3, 1, 2]), np.array([3, 1, 2], np.uint16)],
    ids=["list", "tuple", "int64", "uint16"],
)
def test_token_ids_become_int32(tokens: Any) -> None:
    array = token_array("tokens", tokens)
    assert (array.dtype, array.tolist()) == (np.int32, [3, 1, 2])


def test_the_array_is_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        token_array("tokens", [1])[0] = 2


def test_the_array_is_a_copy() -> None:
    given = np.array([1, 2], np.int32)
    array = token_array("tokens", given)
    given[0] = 9
    assert array.tolist() == [1, 2]


def test_no_token_is_an_empty_array() -> None:
    assert token_array("tokens", []).shape == (0,)


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ("ab", ShapeError, "tokens: expected a sequence of token ids, got str."),
        (5, ShapeError, "tokens: expected a sequence of token ids, got int."),
        ([[1, 2]], ShapeError, "tokens: expected one sequence of token ids (n,), got a nested one."),
        ([[1], [2, 3]], ShapeError, "tokens: expected one sequence of token ids (n,), got a nested one."),
        ([1.5], DTypeError, "tokens: expected token ids that are integers of at most 64 bits, got float64."),
        ([True], DTypeError, "tokens: expected token ids that are integers of at most 64 bits, got bool."),
        ([2**70], DTypeError, "tokens: expected token ids that are integers of at most 64 bits, got object."),
        ([3, -1], RangeError, "tokens: expected token ids from 0 to 2147483647, got -1 to 3."),
        ([2**31], RangeError, "tokens: expected token ids from 0 to 2147483647, got 2147483648 to 2147483648."),
    ],
)
def test_what_is_refused(tokens: Any, error: type[KVCacheError], message: str) -> None:
    with pytest.raises(error) as raised:
        token_array("tokens", tokens)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [([1, 2, 3], [1, 2, 4], 2), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 2], 2), ([5], [6], 0), ([], [1], 0), ([], [], 0), ([7], [7], 1)],
)
def test_common_prefix(first: list[int], second: list[int], expected: int) -> None:
    assert common_prefix(first, second) == expected


def reusable(held: list[int], prompt: list[int], *, whole: bool = False) -> int:
    return reusable_tokens(token_array("held", held), token_array("prompt", prompt), whole=whole)


@pytest.mark.parametrize(
    ("held", "prompt", "expected"),
    [([1, 2, 3], [1, 2, 4], 2), ([1, 2, 3], [1, 2, 3, 4], 3), ([1, 2, 3], [9], 0), ([], [1, 2], 0)],
)
def test_what_is_held_need_not_be_run(held: list[int], prompt: list[int], expected: int) -> None:
    assert reusable(held, prompt) == expected


def test_at_least_one_token_is_run() -> None:
    assert reusable([1, 2, 3], [1, 2, 3]) == 2
    assert reusable([1, 2, 3], [1, 2]) == 1
    assert reusable([1], [1]) == 0


@pytest.mark.parametrize(("prompt", "expected"), [([1, 2, 3], 2), ([1, 2, 3, 4], 2), ([1, 3, 4], 0), ([1, 2], 0)])
def test_recurrent_states_are_reused_whole_or_not_at_all(prompt: list[int], expected: int) -> None:
    assert reusable([1, 2], prompt, whole=True) == expected
