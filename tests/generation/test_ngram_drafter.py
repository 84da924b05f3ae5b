"""Prompt lookup: what followed the last tokens where a sequence had them before."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from trt_kvcache import DraftedSequence, SamplingParams
from trt_kvcache.generation.ngram_drafter import NgramDrafter
from trt_kvcache.generation.request import Request


def request() -> Request:
    return Request(0, [1], SamplingParams(), tokenizer=None, eos_token_ids=())


def sequence(tokens: Sequence[int], limit: int, of: Request | None = None) -> DraftedSequence:
    return DraftedSequence(of or request(), [*tokens[:-1], 99, 99], len(tokens) - 1, tuple(tokens[-1:]), limit)


def draft(tokens: Sequence[int], limit: int = 4) -> list[int]:
    [found] = NgramDrafter().propose([sequence(tokens, limit)])
    return found


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5, 1]),
        ([1, 2, 3, 1, 2, 4, 7, 7, 1, 2], [4, 7, 7, 1]),  # the latest place
        ([9, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2], [3, 8, 1, 2]),  # the place of more equal tokens
        ([1, 2, 1, 2], [1, 2, 1, 2]),  # with the period of what repeats
        ([5, 5, 5], [5, 5, 5, 5]),
        ([1, 2, 3, 2], []),  # one token is not enough
        ([1, 2, 3], []),
        ([1, 2], []),
        ([1], []),
        ([1, 1], []),
    ],
)
def test_drafts(tokens: list[int], expected: list[int]) -> None:
    assert draft(tokens) == expected


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 90, 90, 3, 1, 2], []),  # a row follows the match
        ([1, 2, 3, 90, 4, 1, 2], [3]),  # it ends before a row
        ([1, 2, 3, 4, 90, 1, 2], [3, 4]),
        ([7, 90, 3, 4, 7, 90], []),  # rows match nothing
        ([90, 91, 3, 90, 91], []),
        ([90, 7, 3, 4, 90, 7], []),
        ([90, 1, 2, 3, 5, 1, 2, 4, 90, 1, 2], [4]),  # nor do they make a match longer: the latest place
    ],
)
def test_rows_match_nothing_and_are_not_proposed(tokens: list[int], expected: list[int]) -> None:
    [found] = NgramDrafter().propose([sequence(tokens, 3)._replace(vocab_size=90)])
    assert found == expected


def test_the_limit() -> None:
    assert [len(draft([1, 2, 3, 4, 5, 1, 2], limit)) for limit in (1, 2, 15)] == [1, 2, 15]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 6))
def test_a_sequence_that_grows_has_the_drafts_of_the_whole(tokens: list[int], limit: int) -> None:
    drafter, of = NgramDrafter(), request()
    for length in range(1, len(tokens) + 1):
        [found] = drafter.propose([sequence(tokens[:length], limit, of)])
        assert found == draft(tokens[:length], limit)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 6))
def test_a_draft_follows_an_earlier_occurrence_of_the_last_two_tokens(tokens: list[int], limit: int) -> None:
    found = draft(tokens, limit)
    pairs = [tuple(tokens[place - 2 : place]) for place in range(2, len(tokens))]
    assert bool(found) == (tuple(tokens[-2:]) in pairs)
    if found:
        longer = [*tokens, *found]
        assert any(
            longer[place : place + len(found)] == found and tokens[place - 2 : place] == tokens[-2:] for place in range(2, len(tokens))
        )


def test_a_sequence_that_became_shorter_begins_again() -> None:
    drafter, of = NgramDrafter(), request()
    drafter.propose([sequence([1, 2, 3, 1, 2, 4, 5], 4, of)])
    [found] = drafter.propose([sequence([1, 2, 3, 1, 2], 2, of)])
    assert found == [3, 1]


def test_sequences_have_an_index_each() -> None:
    drafter = NgramDrafter()
    one, other = request(), request()
    assert drafter.propose([sequence([1, 2, 3, 1, 2], 1, one), sequence([1, 2, 4, 1, 2], 1, other)]) == [[3], [4]]
    assert drafter.propose([sequence([1, 2, 4, 1, 2, 4], 1, other), sequence([1, 2, 3, 1, 2, 3], 1, one)]) == [[1], [1]]


def test_the_index_of_a_request_ends_with_it() -> None:
    drafter, one = NgramDrafter(), request()
    drafter.propose([sequence([1, 2, 3], 4, one)])
    assert len(drafter._indexes) == 1
    del one
    gc.collect()
    assert len(drafter._indexes) == 0
