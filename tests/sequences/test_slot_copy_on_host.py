"""Copies of a slot on the host, from any slot and into any, without a wait."""

import itertools

import pytest

from tests.helpers.caches import LAYOUTS, SEQUENCE_KINDS, FailingMemory, Image, S, Unchanged, cache_holding, fill_all
from tests.simt.standin import ALLOCATIONS, WAITS, StandIn, needs_standin
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.errors import CapacityError
from trt_kvcache.sequences.slot_copy import SlotCopy, host_arrays
from trt_kvcache.sequences.slot_format import SlotFormat

KINDS = pytest.mark.parametrize("kind", SEQUENCE_KINDS)
DTYPES = pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])


def as_bytes(arrays):
    return [array.tobytes() for array in arrays]


def held_by(image, slot, length):
    """The bytes of the tensors of a slot in an image: K and V of each attention layer, their scales by token, then all states."""
    rows = [rows[slot, which, :, :length] for parts in (image.rows, image.scales) for rows in parts for which in (0, 1)]
    return as_bytes([*rows, *(states[slot] for states in image.states)])


class TestDownload:
    @KINDS
    @LAYOUTS
    @DTYPES
    @pytest.mark.parametrize("length", [0, 3, S])
    def test_is_what_the_slot_holds(self, memory, stream, kind, layout, dtype, length):
        with cache_holding(kind, memory, stream, 5, 5, layout=layout, dtype=dtype) as cache:
            arrays = SlotCopy.download(cache, 3, length, stream=stream).arrays
            memory.synchronize(stream)
            assert as_bytes(arrays) == held_by(Image(cache), 3, length)

    @KINDS
    def test_arrays_are_those_of_the_format(self, memory, stream, kind):
        with cache_holding(kind, memory, stream, 5) as cache:
            copy = SlotCopy.download(cache, 0, 5, stream=stream)
            arrays = copy.arrays
            expected = [(shape, numpy_dtype(dtype)) for shape, dtype in copy.slot_format.tensors(5).values()]
        assert [(array.shape, array.dtype) for array in arrays] == expected

    @KINDS
    def test_changes_nothing(self, memory, stream, kind):
        with cache_holding(kind, memory, stream, 5) as cache, Unchanged(cache):
            SlotCopy.download(cache, 0, 5, stream=stream)
            memory.synchronize(stream)

    @KINDS
    def test_without_room_on_the_host(self, kind):
        memory = FailingMemory()
        stream = memory.create_stream()
        with cache_holding(kind, memory, stream, 5) as cache:
            memory.failures = 1
            with Unchanged(cache), pytest.raises(CapacityError, match="no room"):
                SlotCopy.download(cache, 0, 5, stream=stream)

    @needs_standin
    @KINDS
    def test_needs_neither_kernels_nor_device_memory(self, memory, stream, kind):
        with cache_holding(kind, memory, stream, 5) as cache:
            standin = StandIn()
            arrays = SlotCopy.download(cache, 0, 5, stream=stream).arrays
            made = standin.take_calls()
            assert {call for call in made if call in ALLOCATIONS} == {"cuMemAllocHost_v2"}
            assert not [call for call in made if call in WAITS or call.startswith("cuLaunchKernel")]
            memory.synchronize(stream)
            assert as_bytes(arrays) == held_by(Image(cache), 0, 5)


class TestUpload:
    @KINDS
    @LAYOUTS
    @DTYPES
    @pytest.mark.parametrize("length", [0, 3, S])
    def test_into_another_slot(self, memory, stream, kind, layout, dtype, length):
        with cache_holding(kind, memory, stream, 5, 5, layout=layout, dtype=dtype) as cache:
            expected = Image(cache)
            copy = SlotCopy.download(cache, 3, length, stream=stream)
            memory.synchronize(stream)
            before = Image(cache)
            for into, taken in zip([*expected.rows, *expected.scales], [*before.rows, *before.scales], strict=True):
                into[1, :, :, :length] = taken[3, :, :, :length]
            for states in expected.states:
                states[1] = states[3]
            copy.upload(cache, 1, length, stream=stream)
            memory.synchronize(stream)
            expected.check(cache)

    def test_of_the_first_tokens_only(self, memory, stream):
        with cache_holding("manager", memory, stream, 5, 5) as cache:
            expected = Image(cache)
            copy = SlotCopy.download(cache, 3, 5, stream=stream)
            memory.synchronize(stream)
            for rows in expected.rows:
                rows[1, :, :, :2] = rows[3, :, :, :2]
            copy.upload(cache, 1, 2, stream=stream)
            memory.synchronize(stream)
            expected.check(cache)

    @pytest.mark.parametrize("both_buffers", [False, True])
    @pytest.mark.parametrize("kind", ["linear", "hybrid"])
    def test_into_both_buffers_of_states(self, memory, stream, kind, both_buffers):
        with cache_holding(kind, memory, stream, 5, 5, ping_pong=True) as cache:
            expected = Image(cache)
            copy = SlotCopy.download(cache, 3, 5, stream=stream)
            memory.synchronize(stream)
            for rows in expected.rows:
                rows[1, :, :, :5] = rows[3, :, :, :5]
            for states, following in zip(expected.states, expected.next_states, strict=True):
                states[1] = states[3]
                following[1] = states[3] if both_buffers else following[1]
            copy.upload(cache, 1, 5, both_buffers=both_buffers, stream=stream)
            memory.synchronize(stream)
            expected.check(cache)


@KINDS
def test_a_copy_in_the_memory_of_the_cache_is_restored_into_another_slot(memory, stream, kind):
    with cache_holding(kind, memory, stream, 5, 5) as cache:
        taken, expected = Image(cache), Image(cache)
        SlotCopy.capture(cache, 1, 5, stream=stream).restore(cache, 3, 5, stream=stream)
        expected.move(3, taken, 1, 5)
        expected.check(cache)


@pytest.mark.parametrize("kind", ["linear", "hybrid", "states"])
def test_states_of_a_slot_are_zeroed(memory, stream, kind):
    with cache_holding(kind, memory, stream, 5, 5) as cache:
        expected = Image(cache)
        cache.states.reset_slots([3], stream=stream)
        expected.zero_states(3)
        expected.check(cache)


@pytest.mark.parametrize("ping_pong", [False, True])
@pytest.mark.parametrize("kind", ["linear", "hybrid", "states"])
def test_current_states_are_copied_to_the_next_ones(memory, stream, kind, ping_pong):
    with cache_holding(kind, memory, stream, 5, ping_pong=ping_pong) as cache:
        fill_all(cache, stream, 3)
        expected = Image(cache)
        cache.keep_states(2, stream=stream)
        for states, following in zip(expected.states, expected.next_states, strict=True):
            following[2] = states[2]
        expected.check(cache)


def test_host_arrays_lie_in_one_allocation():
    memory = FailingMemory()
    with cache_holding("hybrid", memory, memory.create_stream(), 5) as cache:
        memory.left, memory.failures = 1, 1
        arrays = host_arrays(SlotFormat.of(cache), 5, memory)
    starts = [array.ctypes.data for array in arrays]
    assert [after - before for before, after in itertools.pairwise(starts)] == [array.nbytes for array in arrays[:-1]]
