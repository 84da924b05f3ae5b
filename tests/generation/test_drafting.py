"""The acceptance of the drafts of a request, and its counters."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, strategies as st

from trt_kvcache.generation.drafting import Drafting
from trt_kvcache.generation.ngram_drafter import NgramDrafter


def drafting() -> Drafting:
    return Drafting(NgramDrafter())


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("length", [1, 7])
def test_the_rate_is_that_of_single_tokens(rate: float, length: int) -> None:
    """Not the share of drafted tokens, most of which come after a rejected one."""
    chance, one, rates = random.Random(1), drafting(), []
    for _ in range(4000):
        accepted = next((place for place in range(length) if chance.random() >= rate), length)
        one.record(length, accepted)
        rates.append(one.rate)
    assert sum(rates[50:]) / len(rates[50:]) == pytest.approx(rate, abs=0.04)


def test_a_text_that_changes_is_noticed_within_some_tokens() -> None:
    one = drafting()
    for _ in range(20):
        one.record(15, 15)
    assert one.rate > 0.97
    for _ in range(24):
        one.record(1, 0)
    assert one.rate < 0.5


def test_expected_tokens() -> None:
    one = drafting()
    for _ in range(1000):
        one.record(2, 1)
    assert one.rate == pytest.approx(0.5)
    assert [one.expected_tokens(length) for length in range(4)] == pytest.approx([1, 1.5, 1.75, 1.875])


def test_a_token_of_a_tree_is_rejected_where_its_longest_path_is_not_accepted_to_its_end() -> None:
    chain, tree = drafting(), drafting()
    tree.record(9, 3, depth=3)
    chain.record(3, 3)
    assert tree.rate == chain.rate
    assert (tree.proposed, tree.accepted) == (9, 3)


@given(st.lists(st.tuples(st.integers(1, 15), st.integers(0, 15))))
def test_counters_and_bounds(drafts: list[tuple[int, int]]) -> None:
    one = drafting()
    for proposed, accepted in drafts:
        one.record(proposed, min(accepted, proposed))
        assert 0 < one.rate < 1
    assert one.proposed == sum(proposed for proposed, _ in drafts)
    assert one.accepted == sum(min(pair) for pair in drafts)
