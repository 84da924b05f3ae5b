"""``plan_chunks``: every plan enqueues every token in order, and never writes past the end of a slot."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_kvcache.errors import LayoutError
from trt_kvcache.session.chunks import Chunk, plan_chunks


def plan(lengths, remaining, *, starts=(), max_width=100, limit=100):
    return plan_chunks(lengths, remaining, max_width=max_width, max_sequence_length=limit, can_start_at=lambda slot: slot in starts)


def run(chunks, lengths, remaining, *, starts, max_width, limit):
    """Run a plan over rows of tokens: what is committed, what is junk, and what a slot sees are all in the open."""
    start, taken = list(lengths), [0] * len(lengths)
    # One row of cells per slot: ("old" | "new", position) or "junk"; no cell beyond the limit exists.
    cells = [[("old", place) for place in range(length)] + ["free"] * (limit - length) for length in lengths]
    for chunk in chunks:
        assert chunk.first == 0 or chunk.first in starts
        assert 1 <= chunk.width <= max_width
        assert 0 <= chunk.first < chunk.end <= len(lengths)
        for slot, take in enumerate(chunk.takes, start=chunk.first):
            length = start[slot]
            assert length + chunk.width <= limit, f"slot {slot} of {chunk} writes past {limit}"
            new = [("new", taken[slot] + place) for place in range(take)]
            cells[slot][length : length + chunk.width] = new + ["junk"] * (chunk.width - take)
            start[slot] += take
            taken[slot] += take
            assert "junk" not in cells[slot][: start[slot]]
    for row, end, length, count in zip(cells, start, lengths, remaining, strict=True):
        assert row[:end] == [("old", place) for place in range(length)] + [("new", place) for place in range(count)]


@st.composite
def programs(draw):
    limit = draw(st.integers(1, 24))
    slots = draw(st.integers(1, 6))
    lengths = draw(st.lists(st.integers(0, limit), min_size=slots, max_size=slots))
    remaining = [draw(st.integers(0, limit - length)) for length in lengths]
    starts = draw(st.frozensets(st.integers(1, slots)))
    return lengths, remaining, limit, draw(st.integers(1, limit)), starts


def reachable(lengths, remaining, limit, starts):
    """No waiting slot stands behind a full one with no start between: said independently of the plan."""
    for slot, count in enumerate(remaining):
        if count:
            first = max((start for start in starts if start <= slot), default=0)
            if any(lengths[rider] == limit for rider in range(first, slot)):
                return False
    return True


@given(programs())
def test_every_program_is_enqueued_in_order_and_inside_every_slot(program):
    lengths, remaining, limit, max_width, starts = program
    before = list(lengths), list(remaining)
    options = {"starts": starts, "max_width": max_width, "limit": limit}
    if reachable(lengths, remaining, limit, starts):
        run(plan(lengths, remaining, **options), lengths, remaining, **options)
    else:
        with pytest.raises(LayoutError):
            plan(lengths, remaining, **options)
    assert (lengths, remaining) == before


#: What can be started at (None: everywhere), lengths, remaining tokens, and the plan for 100 tokens at once into slots of 100.
PLANS = {
    "not aligned: all before ride along": ((), [9, 9, 9, 0], [0, 0, 0, 3], [Chunk(0, (0, 0, 0, 3))]),
    "a slot that leaves half of the width narrows the call": (None, [0, 50], [100, 50], [Chunk(0, (50, 50)), Chunk(0, (50,))]),
    "a full slot is left out": (None, [0, 100, 0], [3, 0, 4], [Chunk(0, (3,)), Chunk(2, (4,))]),
    "no slot is filled before one that must wait": ((), [95, 0], [5, 12], [Chunk(0, (0, 5)), Chunk(0, (0, 5)), Chunk(0, (5, 2))]),
}


@pytest.mark.parametrize(("starts", "lengths", "remaining", "expected"), PLANS.values(), ids=PLANS)
def test_plans(starts, lengths, remaining, expected):
    assert plan(lengths, remaining, starts=range(9) if starts is None else starts) == expected


def test_a_slot_that_no_call_can_reach_is_refused():
    with pytest.raises(LayoutError) as error:
        plan([0, 100, 0], [3, 0, 4])
    text = "slot 2: slot 1 before it is full, and no view that starts between them is aligned to 256 bytes. Choose max_sequence_length"
    assert str(error.value) == f"{text} so that H * S * D * itemsize is a multiple of 256."
