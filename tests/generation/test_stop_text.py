"""``StopText``: what comes out is the text up to the first stop text, however it came in pieces, and as early as can be."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings, strategies as st

from trt_kvcache.generation.stop_text import StopText


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
    stream = StopText(stops)
    out = "".join(stream.push(piece) for piece in pieces) + stream.flush()
    assert (out, stream.stopped) == naive("".join(pieces), stops)


@settings(max_examples=500)
@given(pieces=st.lists(TEXTS, max_size=6), stops=STOPS)
def test_only_what_could_become_a_stop_text_is_held_back(pieces, stops):
    stream, told, taken = StopText(stops), "", ""
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
    stream = StopText(())
    assert (stream.push("one "), stream.push("two"), stream.flush(), stream.stopped) == ("one ", "two", "", False)


def test_a_stop_text_over_several_pieces():
    stream = StopText(["\n\nUser:"])
    assert [stream.push(piece) for piece in ["Hello", "\n", "\nUs", "er: hi"]] == ["Hello", "", "", ""]
    assert stream.stopped
    assert (stream.push("more"), stream.flush()) == ("", "")


def test_text_that_turns_out_to_be_no_stop_text_comes_later():
    stream = StopText(["</s>"])
    assert [stream.push(piece) for piece in ["a</", "b>", "</"]] == ["a", "</b>", ""]
    assert (stream.flush(), stream.stopped) == ("</", False)
    assert stream.flush() == ""


@pytest.mark.parametrize("pieces", [["abcd"], ["abc", "d"], ["a", "b", "c", "d"]])
def test_the_stop_text_that_is_complete_first_ends_the_text(pieces):
    stream = StopText(["abcd", "bc"])
    assert "".join(map(stream.push, pieces)) == "a"
    assert stream.stopped


def test_the_longest_text_that_could_become_a_stop_text_is_held_back():
    stream = StopText(["abab", "bx"])
    assert [stream.push(piece) for piece in ["xab", "y", "xb"]] == ["x", "aby", "x"]


def test_a_copy_has_held_back_the_same_text_and_continues_on_its_own():
    stream = StopText(["END"])
    assert stream.push("one E") == "one "
    other = stream.copy()
    assert (other.push("ND"), other.stopped) == ("", True)
    assert (stream.stopped, stream.push("cho"), stream.flush()) == (False, "Echo", "")


def test_a_copy_of_a_stream_that_was_stopped_lets_nothing_through():
    stream = StopText(["END"])
    stream.push("END")
    other = stream.copy()
    assert (other.stopped, other.push("more"), other.flush()) == (True, "", "")
