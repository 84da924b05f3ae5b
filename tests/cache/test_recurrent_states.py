"""Capture and restore of recurrent and conv states: which bytes, and what is refused.

That they are refused on a closed cache, without a stream and in a capture: test_cache_refusals.py.
"""

import numpy as np
import pytest

from tests.cache.scene import PING_PONG, driver_calls
from tests.helpers.assertions import raises
from tests.helpers.caches import FailingMemory, Image, Unchanged, cache_holding, fill_all, make_cache, state_of, states_of
from tests.simt.standin import ALLOCATIONS, WAITS, needs_standin
from trt_kvcache import HostMemory
from trt_kvcache.errors import CapacityError, ConfigError, DTypeError, PlaceError, ShapeError, SlotError

KINDS = pytest.mark.parametrize("kind", ["linear", "mamba", "hybrid"])
#: The two kinds of states, and the shape of one slot's in a layer.
SHAPES = {"recurrent_states": (2, 3, 5), "conv_states": (7, 3)}
PARTS = pytest.mark.parametrize("part", SHAPES)


def capture(cache, part, slot, stream):
    return getattr(cache, f"capture_{part}")(slot, stream=stream)


def restore(cache, part, saved, slot, stream):
    getattr(cache, f"restore_{part}")(saved, slot, stream=stream)


def of_part(states, part):
    """An image has all recurrent states first, then all conv states."""
    return states[:2] if part == "recurrent_states" else states[2:]


class TestCapture:
    @KINDS
    @PARTS
    @PING_PONG
    def test_holds_the_current_states_of_a_slot(self, memory, stream, kind, part, ping_pong):
        with cache_holding(kind, memory, stream, 1, 2, ping_pong=ping_pong) as cache:
            for _ in range(3):
                saved = capture(cache, part, 3, stream)
                for array, tensor in zip(of_part(Image(cache).states, part), saved, strict=True):
                    assert np.array_equal(tensor.numpy().view(np.uint8), array[3])
                cache.swap()

    @KINDS
    @PARTS
    def test_is_dense(self, memory, stream, kind, part):
        with make_cache(kind, memory) as cache:
            saved = capture(cache, part, 0, stream)
        dtype = {"recurrent_states": "float32", "conv_states": "float16"}[part]
        assert [(tensor.shape, tensor.dtype, tensor.memory, tensor.is_contiguous) for tensor in saved] == [
            (SHAPES[part], dtype, memory, True)
        ] * 2

    @KINDS
    @PARTS
    def test_is_one_allocation_of_aligned_tensors(self, memory, stream, kind, part):
        with make_cache(kind, memory) as cache:
            saved = capture(cache, part, 0, stream)
        assert len({id(tensor.allocation) for tensor in saved}) == 1
        assert [tensor.ptr % 256 for tensor in saved] == [0, 0]

    @KINDS
    @PARTS
    @PING_PONG
    def test_changes_nothing(self, memory, stream, kind, part, ping_pong):
        with cache_holding(kind, memory, stream, 1, ping_pong=ping_pong) as cache, Unchanged(cache):
            capture(cache, part, 0, stream)

    @KINDS
    @PARTS
    def test_outlives_its_cache(self, memory, stream, kind, part):
        with cache_holding(kind, memory, stream, 1) as cache:
            saved = capture(cache, part, 0, stream)
            expected = [array[0].copy() for array in of_part(Image(cache).states, part)]
        for tensor, array in zip(saved, expected, strict=True):
            assert np.array_equal(tensor.numpy().view(np.uint8), array)

    @KINDS
    @PARTS
    def test_without_room(self, kind, part):
        memory = FailingMemory()
        stream = memory.create_stream()
        with cache_holding(kind, memory, stream, 1) as cache:
            memory.failures = 1
            with Unchanged(cache), pytest.raises(CapacityError, match=r"^no room\.$"):
                capture(cache, part, 0, stream)

    @KINDS
    @PARTS
    @pytest.mark.parametrize("slot", [5, -1, 1.0])
    def test_slots_out_of_range(self, memory, stream, kind, part, slot):
        with cache_holding(kind, memory, stream, 1) as cache, Unchanged(cache), pytest.raises(SlotError) as caught:
            capture(cache, part, slot, stream)
        assert str(caught.value).startswith("slot: expected an integer" if slot == 1.0 else f"slot {slot}: expected 0 <= slot < 5")

    @needs_standin
    @KINDS
    @PARTS
    def test_is_one_launch_and_one_allocation(self, memory, stream, kind, part):
        with make_cache(kind, memory) as cache:
            made, launches = driver_calls(lambda: capture(cache, part, 0, stream))
            assert launches == 1
            assert (not {*made} & WAITS, sum(call in ALLOCATIONS for call in made)) == (True, 1)


class TestRestore:
    @KINDS
    @PARTS
    @PING_PONG
    def test_into_the_current_states_of_another_slot(self, memory, stream, kind, part, ping_pong):
        source, target = (cache_holding(kind, memory, stream, 1, 2, ping_pong=ping_pong) for _ in range(2))
        with source, target:
            for seed in range(3):
                fill_all(source, stream, seed)
                expected = Image(target)
                restore(target, part, capture(source, part, 3, stream), 4, stream)
                for into, array in zip(of_part(expected.states, part), of_part(Image(source).states, part), strict=True):
                    into[4] = array[3]
                expected.check(target)
                target.swap()

    @KINDS
    @PARTS
    def test_leaves_the_lengths_alone(self, memory, stream, kind, part):
        with cache_holding(kind, memory, stream, 5, 2) as cache:
            before = state_of(cache)
            restore(cache, part, capture(cache, part, 0, stream), 1, stream)
            assert state_of(cache) == before

    @KINDS
    @PARTS
    @pytest.mark.parametrize("slot", [5, -1, 1.0])
    def test_slots_out_of_range(self, memory, stream, kind, part, slot):
        with cache_holding(kind, memory, stream, 1) as cache:
            saved = capture(cache, part, 0, stream)
            with Unchanged(cache), pytest.raises(SlotError, match=r"^slot( 5| -1)?: expected "):
                restore(cache, part, saved, slot, stream)

    @needs_standin
    @KINDS
    @PARTS
    def test_is_one_launch_and_neither_waits_nor_allocates(self, memory, stream, kind, part):
        with make_cache(kind, memory) as cache:
            saved = capture(cache, part, 0, stream)
            made, launches = driver_calls(lambda: restore(cache, part, saved, 1, stream))
            assert launches == 1
            assert not {*made} & (WAITS | ALLOCATIONS)


def ones(memory, stream, *shape, dtype=np.float32):
    return memory.to_device(np.ones(shape, dtype), stream=stream)


def foreign():
    host = HostMemory()
    return ones(host, host.create_stream(), 2, 3, 5)


#: What is given in place of two captured recurrent states, made of one that is right, of the memory and of a stream.
BAD = {
    "too few": (lambda good, *_: [good], ShapeError, "saved: expected 2 tensors, one per recurrent layer, got 1."),
    "too many": (lambda good, *_: [good] * 3, ShapeError, "saved: expected 2 tensors, one per recurrent layer, got 3."),
    "one tensor": (
        lambda good, *_: good,
        ShapeError,
        "saved: expected a sequence of tensors, one per recurrent layer, got DeviceTensor.",
    ),
    "an array": (
        lambda good, *_: [good, np.ones((2, 3, 5))],
        PlaceError,
        "saved[1]: expected a DeviceTensor of DEVICE, got ndarray.",
    ),
    "another memory": (
        lambda good, *_: [good, foreign()],
        PlaceError,
        "saved[1]: expected a tensor of the cache's memory, got one of another (cpu).",
    ),
    "another dtype": (
        lambda good, *place: [good, ones(*place, 2, 3, 5, dtype=np.float16)],
        DTypeError,
        "saved[1]: expected float32, got float16.",
    ),
    "another shape": (
        lambda good, *place: [good, ones(*place, 3, 2, 5)],
        ShapeError,
        "saved[1]: expected shape (2, 3, 5), got (3, 2, 5).",
    ),
    "a batch": (
        lambda good, *place: [good, ones(*place, 1, 2, 3, 5)],
        ShapeError,
        "saved[1]: expected shape (2, 3, 5), got (1, 2, 3, 5).",
    ),
}


@KINDS
@pytest.mark.parametrize(("make", "error", "text"), BAD.values(), ids=BAD)
def test_what_cannot_be_restored(memory, stream, kind, make, error, text):
    with cache_holding(kind, memory, stream, 3, 5) as cache:
        saved = make(ones(memory, stream, 2, 3, 5), memory, stream)
        with Unchanged(cache), pytest.raises(error) as caught:
            cache.restore_recurrent_states(saved, 1, stream=stream)
        assert str(caught.value) == text.replace("DEVICE", memory.device)


@KINDS
def test_conv_states_have_a_dtype_of_their_own(memory, stream, kind):
    with cache_holding(kind, memory, stream, 3, 5) as cache:
        saved = [ones(memory, stream, 7, 3)] * 2
        with Unchanged(cache), raises(DTypeError, "saved[0]", expected="float16", got="float32"):
            cache.restore_conv_states(saved, 1, stream=stream)


@KINDS
def test_old_bug_states_where_the_old_batch_is_smaller_than_the_cache(memory, stream, kind):
    """The original takes the old batch for the slots of the buffer: states of later layers come from the wrong place."""
    with make_cache(kind, memory) as cache:
        cache.reset_for_new_sequences([0, 0, 0], stream=stream)
        fill_all(cache, stream)
        cache.commit_sequence_length([2, 4, 3], stream=stream)
        expected = Image(cache)
        expected.compact([-1, 0, 1], [2, 4, 3])
        cache.compact_batch([-1, 0, 1], 3, 2, stream=stream)
        expected.check(cache)


def test_states_of_these_caches_are_of_odd_sizes(memory):
    """A slot's states are no multiple of 16 bytes, so that copies of words do not suffice."""
    with make_cache("hybrid", memory) as cache:
        assert {tensor.nbytes // len(tensor) % 16 for tensor in states_of(cache)} == {8, 10}


@PING_PONG
class TestWithoutARecurrentState:
    """Layers that keep a conv state only."""

    def test_there_is_none_to_look_at(self, memory, ping_pong):
        text = "the recurrent layers have no recurrent state: num_heads is 0 in their configuration."
        with make_cache("conv", memory, ping_pong=ping_pong) as cache:
            for get in (cache.get_recurrent_state, cache.get_next_recurrent_state):
                with pytest.raises(ConfigError, match=f"^{text}$"):
                    get(0)

    def test_none_is_captured_and_none_restored(self, memory, stream, ping_pong):
        with cache_holding("conv", memory, stream, 1, ping_pong=ping_pong) as cache:
            some = cache.capture_conv_states(0, stream=stream)
            with Unchanged(cache):
                assert cache.capture_recurrent_states(0, stream=stream) == []
                cache.restore_recurrent_states([], 0, stream=stream)
                with raises(ShapeError, "saved", expected="0 tensors", got=2):
                    cache.restore_recurrent_states(some, 0, stream=stream)

    def test_conv_states_are_captured_and_restored(self, memory, stream, ping_pong):
        with cache_holding("conv", memory, stream, 1, 2, ping_pong=ping_pong) as cache:
            saved = cache.capture_conv_states(1, stream=stream)
            expected = Image(cache)
            for array in expected.states:
                array[3] = array[1]
            cache.restore_conv_states(saved, 3, stream=stream)
            expected.check(cache)
