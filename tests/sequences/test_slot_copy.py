"""Copies of a slot in the memory of the cache and on the host: the same bytes in either place, and from one to the other."""

import pytest

from tests.helpers.caches import SEQUENCE_KINDS, B, Image, Unchanged, cache_holding, fill_all, make_cache
from trt_kvcache.errors import RangeError, SlotError
from trt_kvcache.sequences.slot_copy import SlotCopy

PLACES = pytest.mark.parametrize("place", ["cache", "host"])
KINDS = pytest.mark.parametrize("kind", SEQUENCE_KINDS)


@PLACES
@KINDS
def test_a_copy_is_where_it_was_made(memory, stream, kind, place):
    with cache_holding(kind, memory, stream, 2, 5) as cache:
        copy = SlotCopy.capture(cache, 1, 5, place=place, stream=stream)
        assert (copy.place, copy.length) == (place, 5)


@KINDS
def test_both_places_hold_the_same_bytes(memory, stream, kind):
    with cache_holding(kind, memory, stream, 2, 5) as cache:
        near, far = (SlotCopy.capture(cache, 1, 5, place=place, stream=stream) for place in ("cache", "host"))
        described = list(far.slot_format.tensors(5).values())
        for copy in (far, near.to_host(cache, stream=stream)):
            assert [(array.shape, array.dtype.name) for array in copy.arrays] == described
        assert [array.tobytes() for array in near.to_host(cache, stream=stream).arrays] == [array.tobytes() for array in far.arrays]


@KINDS
def test_a_copy_moved_to_the_memory_of_a_cache_restores_the_same(memory, stream, kind):
    with cache_holding(kind, memory, stream, 2, 5) as cache:
        taken = Image(cache)
        moved = SlotCopy.capture(cache, 1, 5, place="host", stream=stream).to_cache(cache, stream=stream)
        fill_all(cache, stream, 3)
        want = Image(cache)
        want.move(4, taken, 1, 5)
        moved.restore(cache, 4, 5, stream=stream)
        want.check(cache)


@PLACES
def test_a_copy_that_is_there_is_not_copied_again(memory, stream, place):
    with cache_holding("hybrid", memory, stream, 3) as cache:
        copy = SlotCopy.capture(cache, 0, 3, place=place, stream=stream)
        same = copy.to_host(cache, stream=stream) if place == "host" else copy.to_cache(cache, stream=stream)
        assert same is copy


@PLACES
def test_the_first_tokens_of_a_copy(memory, stream, place):
    with cache_holding("manager", memory, stream, 5) as cache:
        taken = Image(cache)
        copy = SlotCopy.capture(cache, 0, 5, place=place, stream=stream)
        fill_all(cache, stream, 3)
        want = Image(cache)
        want.move(2, taken, 0, 3)
        copy.restore(cache, 2, 3, stream=stream)
        want.check(cache)


@PLACES
def test_what_cannot_be_restored_changes_nothing(memory, stream, place):
    with cache_holding("hybrid", memory, stream, 5) as cache:
        copy = SlotCopy.capture(cache, 0, 5, place=place, stream=stream)
        for slot, length, error in ((B, 5, SlotError), (1, 4, RangeError), (1, 6, RangeError)):
            with Unchanged(cache), pytest.raises(error):
                copy.restore(cache, slot, length, stream=stream)


@pytest.mark.parametrize("both_buffers", [False, True])
def test_states_reach_the_next_buffer_of_a_slot_that_waits(memory, stream, both_buffers):
    with make_cache("hybrid", memory, ping_pong=True) as cache:
        cache.reset_for_new_sequences([4], stream=stream)
        fill_all(cache, stream, 1)
        copy = SlotCopy.capture(cache, 0, 4, place="host", stream=stream)
        fill_all(cache, stream, 2)
        copy.upload(cache, 3, 4, both_buffers=both_buffers, stream=stream)
        cache.swap()
        states = SlotCopy.download(cache, 3, 4, stream=stream).arrays[6:]
        memory.synchronize(stream)
        same = [array.tobytes() for array in states] == [array.tobytes() for array in copy.arrays[6:]]
        assert same is both_buffers
