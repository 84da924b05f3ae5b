"""``plan_chunks``: every plan enqueues every token in order, and never writes past the end of a slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given, strategies as st

from trt_kvcache.engine.protocol import EngineProfile
from trt_kvcache.errors import LayoutError
from trt_kvcache.session.chunks import Chunk, bucket_widths, plan_chunks


def anywhere(slot: int) -> bool:
    return True


def nowhere(slot: int) -> bool:
    return False


def even(slot: int) -> bool:
    return slot % 2 == 0


def run(
    chunks: Sequence[Chunk],
    lengths: Sequence[int],
    remaining: Sequence[int],
    *,
    max_width: int,
    limit: int,
    can_start_at: Callable[[int], bool],
) -> None:
    """Run a plan over rows of tokens: what is committed, what is junk, and what a slot sees are all in the open."""
    start = list(lengths)
    # One row of cells per slot: ("old" | "new", position) or "junk"; no cell beyond the limit exists.
    cells = [[("old", place) for place in range(length)] + ["free"] * (limit - length) for length in lengths]
    taken = [0] * len(lengths)
    for chunk in chunks:
        assert chunk.first == 0 or can_start_at(chunk.first)
        assert 1 <= chunk.width <= max_width
        assert 0 <= chunk.first < chunk.end <= len(lengths)
        for slot in range(chunk.first, chunk.end):
            take, length = chunk.takes[slot - chunk.first], start[slot]
            assert length + chunk.width <= limit, f"slot {slot} of {chunk} writes past {limit}"
            cells[slot][length : length + chunk.width] = ["junk"] * chunk.width
            for place in range(take):
                cells[slot][length + place] = ("new", taken[slot] + place)
            assert "junk" not in cells[slot][: length + take]
            start[slot] += take
            taken[slot] += take
    assert taken == list(remaining)
    for slot, length in enumerate(lengths):
        expected = [("old", place) for place in range(length)] + [("new", place) for place in range(remaining[slot])]
        assert cells[slot][: start[slot]] == expected


@st.composite
def programs(draw):
    limit = draw(st.integers(1, 24))
    slots = draw(st.integers(1, 6))
    lengths = draw(st.lists(st.integers(0, limit), min_size=slots, max_size=slots))
    remaining = [draw(st.integers(0, limit - length)) for length in lengths]
    starts = draw(st.frozensets(st.integers(1, slots)))
    return lengths, remaining, limit, draw(st.integers(1, limit)), starts


def reachable(lengths: Sequence[int], remaining: Sequence[int], limit: int, starts: frozenset[int]) -> bool:
    """No waiting slot stands behind a full one with no start between: said independently of the plan."""
    for slot, count in enumerate(remaining):
        if count:
            first = max((start for start in starts if start <= slot), default=0)
            if any(lengths[rider] == limit for rider in range(first, slot)):
                return False
    return True


POWERS = [1 << exponent for exponent in range(12)]


def in_buckets(max_width: int, buckets: Sequence[int] = POWERS) -> list[int]:
    """Return the buckets of an engine that takes every width up to a maximum."""
    return bucket_widths(buckets, [EngineProfile(name="prefill", min_batch=1, max_batch=9, min_width=1, max_width=max_width)], max_width)


@given(programs(), st.sampled_from([[], POWERS, [1, 2, 3, 4], [1, 6]]))
def test_every_token_is_enqueued_in_order_and_inside_its_slot(program, of_engine):
    lengths, remaining, limit, max_width, starts = program
    before = list(lengths), list(remaining)
    buckets = in_buckets(max_width, of_engine)

    def plan():
        can_start_at = starts.__contains__
        chunks = plan_chunks(lengths, remaining, max_width=max_width, max_sequence_length=limit, can_start_at=can_start_at, buckets=buckets)
        assert not buckets or all(chunk.width in buckets or chunk.width > buckets[-1] for chunk in chunks)
        return chunks

    if reachable(lengths, remaining, limit, starts):
        run(plan(), lengths, remaining, max_width=max_width, limit=limit, can_start_at=starts.__contains__)
    else:
        with pytest.raises(LayoutError):
            plan()
    assert (lengths, remaining) == before


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 40))
def test_new_prompts_are_never_split(counts, max_width):
    chunks = plan_chunks([0] * len(counts), counts, max_width=max_width, max_sequence_length=40, can_start_at=nowhere)
    assert len(chunks) == -(-max(counts) // max_width)
    assert all(chunk.first == 0 for chunk in chunks)
    run(chunks, [0] * len(counts), counts, max_width=max_width, limit=40, can_start_at=nowhere)


def plan(lengths, remaining, *, max_width=100, limit=100, can_start_at=anywhere):
    return plan_chunks(lengths, remaining, max_width=max_width, max_sequence_length=limit, can_start_at=can_start_at)


def test_no_tokens_no_chunks():
    assert plan([3, 4], [0, 0]) == []
    assert plan([], []) == []


def test_ragged_prompts_go_in_one_chunk():
    assert plan([0, 0, 0], [5, 2, 7]) == [Chunk(0, (5, 2, 7))]


def test_a_chunk_knows_its_width():
    chunk = Chunk(2, (0, 3, 1))
    assert (chunk.first, chunk.end, chunk.count, chunk.width) == (2, 5, 3, 3)


def test_the_engine_limits_the_width():
    assert plan([0, 0], [5, 2], max_width=3) == [Chunk(0, (3, 2)), Chunk(0, (2,))]


def test_slots_without_tokens_at_either_end_are_left_out():
    assert plan([9, 0, 0, 9], [0, 2, 3, 0]) == [Chunk(1, (2, 3))]


def test_a_slot_without_tokens_between_others_is_an_idle_slot():
    assert plan([1, 9, 0], [2, 0, 3]) == [Chunk(0, (2, 0, 3))]


def test_a_start_that_is_not_aligned_includes_the_slots_before_it():
    assert plan([9, 9, 9, 0], [0, 0, 0, 3], can_start_at=even) == [Chunk(2, (0, 3))]
    assert plan([9, 9, 9, 0], [0, 0, 0, 3], can_start_at=nowhere) == [Chunk(0, (0, 0, 0, 3))]


def test_a_nearly_full_slot_with_room_for_half_the_width_narrows_the_chunk():
    assert plan([0, 50], [100, 50]) == [Chunk(0, (50, 50)), Chunk(0, (50,))]


def test_a_nearly_full_slot_with_less_room_gets_a_chunk_of_its_own():
    assert plan([0, 51, 0], [100, 49, 90]) == [Chunk(0, (100,)), Chunk(1, (49,)), Chunk(2, (90,))]


def test_a_full_slot_is_left_out():
    assert plan([0, 100, 0], [3, 0, 4]) == [Chunk(0, (3,)), Chunk(2, (4,))]


def test_a_full_slot_is_left_out_even_if_no_view_can_start_at_it():
    # Slot 1 is not aligned, but nothing has to start there.
    assert plan([0, 100, 7, 0], [3, 0, 0, 4], can_start_at=even) == [Chunk(0, (3,)), Chunk(2, (0, 4))]


def test_a_slot_is_not_filled_before_a_later_one_that_no_view_can_start_at():
    chunks = plan([95, 0], [5, 12], can_start_at=nowhere)
    assert chunks == [Chunk(0, (0, 5)), Chunk(0, (0, 5)), Chunk(0, (5, 2))]


def test_a_slot_is_filled_if_a_view_can_start_at_the_next_one():
    assert plan([50, 0, 0], [50, 0, 90], can_start_at=even) == [Chunk(0, (50, 0, 50)), Chunk(2, (40,))]


def test_a_slot_behind_a_full_one_that_no_view_can_start_at_is_refused():
    with pytest.raises(LayoutError) as error:
        plan([0, 100, 0], [3, 0, 4], can_start_at=nowhere)
    assert str(error.value) == (
        "slot 2: slot 1 before it is full, and no view that starts between them is aligned to 256 bytes. "
        "Choose max_sequence_length so that H * S * D * itemsize is a multiple of 256."
    )


class TestBuckets:
    def widths(
        self, *counts: int, length: int = 0, max_width: int = 512, limit: int = 10_000, buckets: Sequence[int] = POWERS, pads: bool = False
    ) -> list[int]:
        allowed = in_buckets(max_width, buckets)
        chunks = plan_chunks([length] * len(counts), counts, max_width=max_width, max_sequence_length=limit, buckets=allowed, pads=pads)
        return [chunk.width for chunk in chunks]

    def test_they_are_powers_of_two_and_the_maximum(self):
        assert in_buckets(1) == [1]
        assert in_buckets(16) == [1, 2, 4, 8, 16]
        assert in_buckets(20) == [1, 2, 4, 8, 16, 20]

    def test_a_width_that_no_profile_takes_is_none(self):
        profile = EngineProfile(name="prefill", min_batch=1, max_batch=1, min_width=4, max_width=16)
        assert bucket_widths(POWERS, [profile], 16) == [4, 8, 16]
        decode = EngineProfile(name="decode", min_batch=1, max_batch=1, min_width=1, max_width=1)
        assert bucket_widths(POWERS, [profile, decode], 16) == [1, 4, 8, 16]

    def test_an_engine_without_buckets_has_none(self):
        assert in_buckets(16, []) == []

    def test_the_maximum_is_one_only_below_the_largest(self):
        assert in_buckets(5, [1, 2, 4, 8]) == [1, 2, 4, 5]
        assert in_buckets(8, [1, 2, 4, 8]) == [1, 2, 4, 8]
        assert in_buckets(9, [1, 2, 4, 8]) == [1, 2, 4, 8]

    def test_widths_above_the_largest_are_exact(self):
        assert self.widths(70, buckets=[1, 16, 64]) == [70]
        assert self.widths(700, buckets=[1, 16, 64]) == [512, 188]
        assert self.widths(62, buckets=[1, 16, 64]) == [64]
        assert self.widths(70, buckets=[1, 16, 64], length=935, limit=1005) == [70]
        assert self.widths(70, 62, buckets=[1, 16, 64], limit=70) == [70]

    def test_a_short_prompt_is_one_enqueue(self):
        assert [self.widths(count) for count in (1, 2, 3, 5, 9, 33, 63)] == [[1], [2], [4], [8], [16], [64], [64]]

    def test_a_long_prompt_is_cut_where_padding_would_be_much(self):
        assert self.widths(100) == [64, 32, 4]
        assert self.widths(72 + 256) == [256, 64, 8]

    def test_a_long_prompt_is_padded_where_padding_is_little(self):
        assert self.widths(112) == [128]
        assert self.widths(600) == [512, 128]

    def test_a_long_prompt_that_pads_is_padded_however_much_that_is(self):
        assert self.widths(100, pads=True) == [128]
        assert self.widths(512 + 65, pads=True) == [512, 128]
        assert self.widths(100, pads=True, length=20, limit=130) == [64, 32, 4]

    @pytest.mark.parametrize("max_width", [512, 300, 64])
    def test_at_most_one_row_in_eight_is_padding(self, max_width):
        for count in range(64, 1500):
            rows = sum(self.widths(count, max_width=max_width))
            assert (rows - count) * 8 <= rows

    @example(count=110, length=5, room=40, max_width=512)  # 18 of 128 rows would be padding
    @given(count=st.integers(64, 1500), length=st.integers(0, 300), room=st.integers(0, 70), max_width=st.integers(1, 600))
    def test_so_it_is_for_every_length_and_room_and_nothing_is_written_past_s(self, count, length, room, max_width):
        limit = length + count + room
        chunks = plan_chunks([length], [count], max_width=max_width, max_sequence_length=limit, buckets=in_buckets(max_width))
        rows = sum(chunk.width for chunk in chunks)
        assert (rows - count) * 8 <= rows
        run(chunks, [length], [count], max_width=max_width, limit=limit, can_start_at=even)

    def test_the_longest_row_of_the_slots_counts(self):
        assert self.widths(3, 112, 64) == [128]

    def test_padding_ends_at_s(self):
        assert self.widths(13, length=87, limit=100) == [8, 4, 1]
        assert self.widths(13, length=84, limit=100) == [16]
