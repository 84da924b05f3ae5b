"""The length of the drafts of a request, and its counters."""

from __future__ import annotations

from hypothesis import given, strategies as st

from trt_kvcache.generation.drafting import Drafting
from trt_kvcache.generation.ngram_drafter import NgramDrafter


def drafting() -> Drafting:
    return Drafting(NgramDrafter())


def test_drafts_that_are_accepted_double_up_to_fifteen() -> None:
    one, lengths = drafting(), []
    for place in range(4):
        lengths.append(one.length(place))
        one.record(lengths[-1], lengths[-1], place)
    assert lengths == [3, 7, 15, 15]
    assert (one.proposed, one.accepted) == (40, 40)


def test_a_short_draft_that_is_accepted_does_not_shorten_the_next() -> None:
    one = drafting()
    one.record(1, 1, 0)
    assert one.length(0) == 3


def test_drafts_of_which_half_is_accepted_keep_their_length() -> None:
    one = drafting()
    one.record(3, 2, 0)
    assert one.length(0) == 3


def test_drafts_that_are_rejected_become_shorter_then_pause_longer_each_time() -> None:
    one, tried = drafting(), []
    for tokens in range(600):
        length = one.length(tokens)
        if length:
            tried.append((tokens, length))
            one.record(length, 0, tokens)
    assert tried == [(0, 3), (1, 1), (9, 1), (25, 1), (57, 1), (121, 1), (249, 1), (377, 1), (505, 1)]


def test_an_accepted_draft_ends_the_long_pauses() -> None:
    one = drafting()
    for tokens in (0, 1, 9, 25):
        one.record(one.length(tokens), 0, tokens)
    assert [one.length(tokens) for tokens in (56, 57)] == [0, 1]
    one.record(1, 1, 58)
    assert one.length(58) == 3
    for tokens in (58, 59):
        one.record(one.length(tokens), 0, tokens)
    assert [one.length(tokens) for tokens in (66, 67)] == [0, 1]


@given(st.lists(st.tuples(st.integers(1, 15), st.integers(0, 15))))
def test_lengths_are_those_of_an_enqueue(drafts: list[tuple[int, int]]) -> None:
    one = drafting()
    for tokens, (proposed, accepted) in enumerate(drafts):
        length = one.length(tokens)
        assert length in (0, 1, 3, 7, 15)
        if length:
            one.record(min(proposed, length), min(accepted, proposed, length), tokens)
