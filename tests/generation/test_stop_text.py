"""``StopText``: what comes out is the text up to the first stop text, however it came in pieces, and as early as can be."""

from hypothesis import given, settings
from hypothesis import strategies as st

from trt_kvcache.generation.stop_text import StopText


def naive(text, stops):
    """Read character by character; the first stop text that is complete ends it, the longest if several are at once."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@settings(max_examples=500)
@given(pieces=st.lists(st.text("ab\n", max_size=8), max_size=6), stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3))
def test_pieces_do_not_matter_and_only_what_could_still_become_a_stop_text_is_held_back(pieces, stops):
    stream, told, taken = StopText(stops), "", ""
    for piece in pieces:
        told += stream.push(piece)
        taken += piece
        if not stream.stopped:
            ends = [taken[start:] for start in range(len(taken) + 1)]
            assert taken == told + next(end for end in ends if not end or any(stop.startswith(end) for stop in stops))
    assert (told + stream.flush(), stream.stopped) == naive("".join(pieces), stops)
