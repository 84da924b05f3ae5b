"""``StopMatcher``: the text up to the first stop text is released as early as possible, however it came in pieces."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings, strategies as st

from trt_kvcache.generation.stop_matcher import StopMatcher, StopState


class Stream:
    """A stream of text through a matcher."""

    def __init__(self, stops: Sequence[str], state: StopState | None = None):
        self.matcher = StopMatcher(stops)
        self.state = state or StopState()

    @property
    def stopped(self) -> bool:
        return self.state.stopped

    def push(self, text: str) -> str:
        released, self.state = self.matcher.push(self.state, text)
        return released


def naive(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Read character by character; the first stop text that is complete ends it, the longest if several are at once."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


TEXTS = st.text("ab\n", max_size=8)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3)


@settings(max_examples=500)
@given(pieces=st.lists(TEXTS, max_size=6), stops=STOPS)
def test_the_result_does_not_depend_on_the_pieces(pieces, stops):
    stream = Stream(stops)
    out = "".join(stream.push(piece) for piece in pieces) + stream.state.held
    assert (out, stream.stopped) == naive("".join(pieces), stops)


@settings(max_examples=500)
@given(pieces=st.lists(TEXTS, max_size=6), stops=STOPS)
def test_only_what_could_become_a_stop_text_is_held_back(pieces, stops):
    stream, told, taken = Stream(stops), "", ""
    for piece in pieces:
        told += stream.push(piece)
        taken += piece
        if stream.stopped:
            return
        held = taken[len(told) :]
        assert taken.startswith(told)
        assert held == max(
            (taken[start:] for start in range(len(taken)) if any(s.startswith(taken[start:]) for s in stops)), key=len, default=""
        )


def test_without_stop_texts_nothing_is_held_back():
    stream = Stream(())
    assert (stream.push("one "), stream.push("two"), stream.state.held, stream.stopped) == ("one ", "two", "", False)


def test_a_stop_text_over_several_pieces():
    stream = Stream(["\n\nUser:"])
    assert [stream.push(piece) for piece in ["Hello", "\n", "\nUs", "er: hi"]] == ["Hello", "", "", ""]
    assert stream.stopped
    assert (stream.push("more"), stream.state.held) == ("", "")


def test_text_that_turns_out_to_be_no_stop_text_comes_later():
    stream = Stream(["</s>"])
    assert [stream.push(piece) for piece in ["a</", "b>", "</"]] == ["a", "</b>", ""]
    assert stream.state == StopState(held="</", stopped=False)


@pytest.mark.parametrize("pieces", [["abcd"], ["abc", "d"], ["a", "b", "c", "d"]])
def test_the_stop_text_that_is_complete_first_ends_the_text(pieces):
    stream = Stream(["abcd", "bc"])
    assert "".join(map(stream.push, pieces)) == "a"
    assert stream.stopped


def test_the_longest_text_that_could_become_a_stop_text_is_held_back():
    stream = Stream(["abab", "bx"])
    assert [stream.push(piece) for piece in ["xab", "y", "xb"]] == ["x", "aby", "x"]


def test_an_earlier_state_is_unchanged_by_the_text_after_it():
    stream = Stream(["END"])
    assert stream.push("one E") == "one "
    earlier = stream.state
    assert (stream.push("ND"), stream.stopped) == ("", True)
    other = Stream(["END"], earlier)
    assert (other.stopped, other.push("cho"), other.state.held) == (False, "Echo", "")
