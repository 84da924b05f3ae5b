"""``Lengths``: what each operation does to the device tensor, the host mirror and the active batch size, and what is refused."""

import copy
import pickle
from contextlib import contextmanager

import numpy as np
import pytest

from tests.helpers.assertions import raises
from tests.helpers.caches import CapturingMemory, state_of_lengths, whole
from trt_kvcache import HostMemory, Lengths
from trt_kvcache.errors import (
    CapacityError,
    CaptureError,
    ClosedError,
    ConfigError,
    DTypeError,
    LengthsUnknown,
    PlaceError,
    RangeError,
    ShapeError,
    SlotError,
)

B, S = 4, 10


@pytest.fixture
def lengths(memory):
    lengths = Lengths(B, S, memory=memory)
    yield lengths
    lengths.close()


def device(lengths):
    """The lengths of the active slots, as the device has them."""
    return lengths.active_tensor.numpy().tolist()


def on_device(memory, values, stream, dtype=np.int32):
    return memory.to_device(np.array(values, dtype), stream=stream)


@contextmanager
def unchanged(lengths):
    """All bytes with their padding, the host's copy and the live memory are afterwards as before."""

    def observe():
        return whole(lengths.tensor).numpy().tobytes(), state_of_lengths(lengths), lengths.tensor.memory.live_nbytes

    before = observe()
    yield
    assert observe() == before


class TestStart:
    def test_no_slot_is_active_and_all_lengths_are_zero(self, lengths):
        assert (lengths.max_batch_size, lengths.max_sequence_length) == (B, S)
        assert lengths.active_batch_size == 0
        assert lengths.tensor.numpy().tolist() == [0] * B
        assert (lengths.tensor.shape, lengths.tensor.dtype) == ((B,), "int32")
        assert lengths.active_tensor.shape == (0,)
        assert (lengths.host, lengths.upper_bounds) == ((), ())
        assert lengths.all_empty

    @pytest.mark.parametrize(("batch", "nbytes"), [(1, 256), (64, 256), (65, 512)])
    def test_bytes_are_padded_and_live(self, memory, batch, nbytes):
        before = memory.live_nbytes
        lengths = Lengths(batch, S, memory=memory)
        assert Lengths.nbytes_for(batch) == lengths.nbytes == memory.live_nbytes - before == nbytes
        assert lengths.tensor.ptr % 256 == 0
        lengths.close()
        lengths.close()
        assert memory.live_nbytes == before

    @pytest.mark.parametrize("value", [0, -1, 2**31, 2.0, True, "4", None])
    def test_sizes_out_of_range(self, memory, value):
        before = memory.live_nbytes
        with raises(ConfigError, "max_batch_size", "integer"):
            Lengths(value, S, memory=memory)
        with raises(ConfigError, "max_sequence_length", expected="integer"):
            Lengths(B, value, memory=memory)
        assert memory.live_nbytes == before

    def test_they_start_at_zero_on_memory_that_does_not(self):
        class Stale(HostMemory):
            def allocate(self, nbytes, *, zeroed=False, stream):
                allocation = super().allocate(nbytes, zeroed=zeroed, stream=stream)
                if not zeroed:
                    allocation.storage[:] = 0x7F
                return allocation

        assert Lengths(B, S, memory=Stale()).tensor.numpy().tolist() == [0] * B


class TestReset:
    @pytest.mark.parametrize("values", [[3, 0, 10], (3, 0, 10), np.array([3, 0, 10]), np.array([3, 0, 10], np.uint8)])
    def test_sets_lengths_and_active_batch(self, lengths, stream, values):
        lengths.reset(values, stream=stream)
        assert lengths.active_batch_size == 3
        assert device(lengths) == [3, 0, 10]
        assert lengths.host == lengths.upper_bounds == (3, 0, 10)
        assert all(type(length) is int for length in lengths.host)
        assert not lengths.all_empty

    def test_replaces_what_was_there(self, lengths, stream):
        lengths.reset([1, 2, 3, 4], stream=stream)
        lengths.reset([5, 0], stream=stream)
        assert (device(lengths), lengths.host) == ([5, 0], (5, 0))

    def test_of_no_slots(self, lengths, stream):
        lengths.reset([1], stream=stream)
        lengths.reset([], stream=stream)
        assert (lengths.active_batch_size, device(lengths), lengths.host, lengths.all_empty) == (0, [], (), True)

    def test_all_empty(self, lengths, stream):
        lengths.reset([0, 0, 0], stream=stream)
        assert lengths.all_empty
        lengths.reset([0, 0, 1], stream=stream)
        assert not lengths.all_empty

    def test_the_caller_keeps_its_array(self, lengths, stream):
        values = [3, 4]
        lengths.reset(values, stream=stream)
        values[0] = 9
        lengths.commit(1, stream=stream)
        assert (values, lengths.host) == ([9, 4], (4, 5))

    def test_makes_the_mirror_exact_again(self, lengths, memory, stream):
        lengths.reset([1, 1], stream=stream)
        lengths.commit(on_device(memory, [1, 0], stream), max_increment=1, stream=stream)
        lengths.reset([2], stream=stream)
        assert lengths.host == (2,)


class TestCommit:
    def test_of_a_number_counts_for_the_active_slots_alone(self, lengths, stream):
        lengths.reset([1, 2, 3], stream=stream)
        lengths.set_active_batch_size(2, stream=stream)
        lengths.commit(7, stream=stream)
        assert (device(lengths), lengths.host) == ([8, 9], (8, 9))
        assert lengths.tensor.numpy().tolist()[2] == 3

    @pytest.mark.parametrize("increment", [np.int64(2), np.array(2), 2])
    def test_of_any_kind_of_number(self, lengths, stream, increment):
        lengths.reset([1, 2], stream=stream)
        lengths.commit(increment, stream=stream)
        assert (device(lengths), lengths.host) == ([3, 4], (3, 4))

    @pytest.mark.parametrize("values", [[2, 0, 5], (2, 0, 5), np.array([2, 0, 5], np.int32), np.array([2, 9, 0, 9, 5, 9])[::2]])
    def test_of_host_values(self, lengths, stream, values):
        lengths.reset([1, 2, 3], stream=stream)
        lengths.commit(values, stream=stream)
        assert (device(lengths), lengths.host) == ([3, 2, 8], (3, 2, 8))

    def test_of_a_device_tensor_makes_the_mirror_a_bound(self, lengths, memory, stream):
        lengths.reset([1, 0, 3], stream=stream)
        lengths.commit(on_device(memory, [2, 0, 4], stream), max_increment=5, stream=stream)
        assert device(lengths) == [3, 0, 7]
        assert lengths.upper_bounds == (6, 5, 8)
        assert not lengths.all_empty
        with pytest.raises(LengthsUnknown) as caught:
            _ = lengths.host
        assert str(caught.value) == (
            "the lengths of slots [0, 1, 2] were changed by values that only the device has. Call sync_lengths(stream=) to read them."
        )
        lengths.sync_lengths(stream=stream)
        assert lengths.host == lengths.upper_bounds == (3, 0, 7)

    def test_of_a_number_after_a_device_tensor_moves_the_bound(self, lengths, memory, stream):
        lengths.reset([0, 0], stream=stream)
        lengths.commit(on_device(memory, [1, 2], stream), max_increment=2, stream=stream)
        lengths.commit(3, stream=stream)
        lengths.commit([0, 1], stream=stream)
        assert lengths.upper_bounds == (5, 6)
        with pytest.raises(LengthsUnknown):
            _ = lengths.host
        lengths.sync_lengths(stream=stream)
        assert lengths.host == (4, 6)

    def test_of_nothing(self, lengths, memory, stream):
        lengths.reset([4, 0], stream=stream)
        lengths.commit(0, stream=stream)
        lengths.commit([0, 0], stream=stream)
        assert (device(lengths), lengths.host) == ([4, 0], (4, 0))

    def test_without_active_slots(self, lengths, memory, stream):
        lengths.commit(3, stream=stream)
        lengths.commit([], stream=stream)
        lengths.commit(on_device(memory, [], stream), max_increment=3, stream=stream)
        assert (lengths.tensor.numpy().tolist(), lengths.host) == ([0] * B, ())

    def test_to_the_last_token_and_no_further(self, lengths, memory, stream):
        lengths.reset([3, S], stream=stream)
        lengths.commit([S - 3, 0], stream=stream)
        assert lengths.host == (S, S)
        with unchanged(lengths), pytest.raises(CapacityError):
            lengths.commit(1, stream=stream)
        with unchanged(lengths), pytest.raises(CapacityError):
            lengths.commit([0, 1], stream=stream)
        with unchanged(lengths), pytest.raises(CapacityError):
            lengths.commit(on_device(memory, [0, 0], stream), max_increment=1, stream=stream)
        lengths.commit(on_device(memory, [0, 0], stream), max_increment=0, stream=stream)
        assert device(lengths) == [S, S]

    def test_overflow_is_judged_on_the_bound_until_the_lengths_are_read(self, lengths, memory, stream):
        lengths.reset([2, 2], stream=stream)
        lengths.commit(on_device(memory, [1, 1], stream), max_increment=6, stream=stream)
        with unchanged(lengths), pytest.raises(CapacityError) as caught:
            lengths.commit(3, stream=stream)
        assert str(caught.value) == (
            "slot 0 holds at most 8 tokens; committing 3 more exceeds max_sequence_length=10. Nothing was changed. "
            "Call sync_lengths(stream=) to learn its exact length."
        )
        lengths.sync_lengths(stream=stream)
        lengths.commit(3, stream=stream)
        assert lengths.host == (6, 6)

    def test_more_values_than_one_launch_carries(self, memory, stream):
        lengths = Lengths(37, 100, memory=memory)
        lengths.reset(range(37), stream=stream)
        lengths.commit(list(range(37, 0, -1)), stream=stream)
        assert device(lengths) == [37] * 37
        lengths.commit(on_device(memory, range(37), stream), max_increment=36, stream=stream)
        assert device(lengths) == [37 + slot for slot in range(37)]
        lengths.close()


class TestActiveBatch:
    def test_shrinking_keeps_the_first_slots(self, lengths, stream):
        lengths.reset([3, 4, 5], stream=stream)
        lengths.set_active_batch_size(2, stream=stream)
        assert (lengths.active_batch_size, device(lengths), lengths.host) == (2, [3, 4], (3, 4))

    def test_new_slots_are_empty_whatever_they_held(self, lengths, stream):
        lengths.reset([3, 4, 5], stream=stream)
        lengths.set_active_batch_size(1, stream=stream)
        lengths.set_active_batch_size(4, stream=stream)
        assert (device(lengths), lengths.host) == ([3, 0, 0, 0], (3, 0, 0, 0))

    def test_to_nothing_and_to_the_same(self, lengths, stream):
        lengths.reset([3, 4], stream=stream)
        lengths.set_active_batch_size(2, stream=stream)
        assert (device(lengths), lengths.host) == ([3, 4], (3, 4))
        lengths.set_active_batch_size(0, stream=stream)
        assert (lengths.active_batch_size, lengths.host, lengths.all_empty) == (0, (), True)

    def test_what_is_unknown_stays_unknown_and_what_is_new_is_known(self, lengths, memory, stream):
        lengths.reset([1, 2], stream=stream)
        lengths.commit(on_device(memory, [1, 1], stream), max_increment=2, stream=stream)
        lengths.set_active_batch_size(1, stream=stream)
        lengths.set_active_batch_size(3, stream=stream)
        assert (device(lengths), lengths.upper_bounds) == ([2, 0, 0], (3, 0, 0))
        with pytest.raises(LengthsUnknown, match=r"^the lengths of slots \[0\] were changed"):
            _ = lengths.host

    def test_a_slot_whose_length_is_unknown_is_told_from_one_whose_is_known(self, lengths, memory, stream):
        lengths.reset([1, 2], stream=stream)
        lengths.commit(on_device(memory, [1, 1], stream), max_increment=2, stream=stream)
        lengths.set_active_batch_size(3, stream=stream)
        assert ([lengths.is_exact(slot) for slot in range(3)], lengths.of_slot(2)) == ([False, False, True], 0)
        with pytest.raises(LengthsUnknown, match=r"^the lengths of slots \[0\] were changed"):
            lengths.of_slot(0)

    def test_what_is_cleared_is_known_again(self, lengths, memory, stream):
        lengths.reset([1, 2], stream=stream)
        lengths.commit(on_device(memory, [1, 1], stream), max_increment=2, stream=stream)
        lengths.clear_slot(0, stream=stream)
        lengths.set_active_batch_size(1, stream=stream)
        assert lengths.host == (0,)

    @pytest.mark.parametrize("name", ["is_exact", "of_slot"])
    def test_slots_that_are_not_active_have_no_length(self, lengths, stream, name):
        lengths.reset([1, 2], stream=stream)
        with raises(SlotError, "slot 2", expected="0 <= slot < 2 (active slots)"):
            getattr(lengths, name)(2)

    def test_admission_beside_running_sequences(self, lengths, stream):
        lengths.reset([7], stream=stream)
        lengths.set_active_batch_size(3, stream=stream)
        lengths.commit([0, 5, 0], stream=stream)
        lengths.commit([0, 2, 4], stream=stream)
        assert (device(lengths), lengths.host) == ([7, 7, 4], (7, 7, 4))


class TestOneSlot:
    def test_clear(self, lengths, stream):
        lengths.reset([3, 4, 5], stream=stream)
        lengths.clear_slot(1, stream=stream)
        assert (device(lengths), lengths.host) == ([3, 0, 5], (3, 0, 5))

    @pytest.mark.parametrize("length", [4, 2, 0, np.int32(2)])
    def test_rewind(self, lengths, stream, length):
        lengths.reset([3, 4, 5], stream=stream)
        lengths.rewind(1, length, stream=stream)
        assert (device(lengths), lengths.host) == ([3, length, 5], (3, length, 5))

    def test_rewind_never_lengthens(self, lengths, stream):
        lengths.reset([3, 4, 5], stream=stream)
        for length in (5, -1):
            with unchanged(lengths), raises(RangeError, "rewind: slot 1 holds 4 tokens", expected="0 to 4", got=length):
                lengths.rewind(1, length, stream=stream)

    def test_rewind_needs_to_know_the_length(self, lengths, memory, stream):
        lengths.reset([3, 4], stream=stream)
        lengths.commit(on_device(memory, [0, 1], stream), max_increment=1, stream=stream)
        with unchanged(lengths), pytest.raises(LengthsUnknown) as caught:
            lengths.rewind(1, 2, stream=stream)
        assert str(caught.value) == "rewind: only the device knows the length of slot 1. Call sync_lengths(stream=) before."
        lengths.sync_lengths(stream=stream)
        lengths.rewind(1, 2, stream=stream)
        assert lengths.host == (3, 2)


class TestCompact:
    """Without anything else in the slots; with it in test_compaction.py."""

    @pytest.mark.parametrize("form", ["list", "tuple", "array"])
    def test_of_a_host_mapping(self, lengths, stream, form):
        lengths.reset([3, 4, 5, 6], stream=stream)
        mapping = {"list": list, "tuple": tuple, "array": np.array}[form]([1, -1, 2, 0])
        lengths.compact(mapping, 4, 3, stream=stream)
        assert (device(lengths), lengths.host, lengths.active_batch_size) == ([6, 3, 5], (6, 3, 5), 3)
        assert lengths.tensor.numpy().tolist()[3] == 6
        assert lengths.tensor.ptr == lengths.active_tensor.ptr

    def test_of_a_device_mapping(self, lengths, memory, stream):
        lengths.reset([3, 4, 5, 6], stream=stream)
        lengths.compact(on_device(memory, [-1, 0, -1, 1], stream), 4, 2, stream=stream)
        assert (device(lengths), lengths.upper_bounds) == ([4, 6], (5, 6))
        with pytest.raises(LengthsUnknown):
            _ = lengths.host
        lengths.sync_lengths(stream=stream)
        assert lengths.host == (4, 6)

    def test_of_more_slots_than_one_launch_carries(self, memory, stream):
        lengths = Lengths(150, 500, memory=memory)
        values = [3 * slot for slot in range(150)]
        lengths.reset(values, stream=stream)
        order = np.random.default_rng(0).permutation(150)
        lengths.compact(order, 150, 150, stream=stream)
        expected = [0] * 150
        for old, new in enumerate(order.tolist()):
            expected[new] = values[old]
        assert (device(lengths), lengths.host) == (expected, tuple(expected))
        lengths.close()


class TestReplay:
    def test_moves_the_mirror_and_not_the_device(self, lengths, stream):
        lengths.reset([3, 4], stream=stream)
        lengths.replayed(2)
        assert (device(lengths), lengths.host) == ([3, 4], (5, 6))

    def test_of_a_device_tensor_makes_the_mirror_a_bound(self, lengths, stream):
        lengths.reset([3, 4], stream=stream)
        lengths.replayed(2, exact=False)
        assert lengths.upper_bounds == (5, 6)
        with pytest.raises(LengthsUnknown):
            _ = lengths.host

    def test_checks_the_capacity_before_the_launch(self, lengths, stream):
        lengths.reset([S - 1, S - 2], stream=stream)
        refused = raises(CapacityError, "slot 0 holds 9 tokens; committing 2 more exceeds max_sequence_length=10")
        with unchanged(lengths), refused:
            lengths.replayed(2)

    @pytest.mark.parametrize("value", [-1, 1.0, "1"])
    def test_of_nonsense(self, lengths, stream, value):
        lengths.reset([3], stream=stream)
        with unchanged(lengths), pytest.raises(RangeError, match=r"^increment: expected"):
            lengths.replayed(value)


REFUSED = {
    "reset_for_new_sequences": lambda lengths, stream: lengths.reset([1], stream=stream),
    "commit_sequence_length with host values": lambda lengths, stream: lengths.commit([1, 1], stream=stream),
    "set_active_batch_size": lambda lengths, stream: lengths.set_active_batch_size(3, stream=stream),
    "clear_slot": lambda lengths, stream: lengths.clear_slot(0, stream=stream),
    "rewind": lambda lengths, stream: lengths.rewind(0, 1, stream=stream),
    "compact_batch with a host mapping": lambda lengths, stream: lengths.compact([1, 0], 2, 2, stream=stream),
}


class TestCapture:
    HINT = "Capture commits of a number or a device tensor, and compactions with a device mapping. Nothing was changed."

    @pytest.fixture
    def capturing(self):
        memory = CapturingMemory()
        lengths = Lengths(B, S, memory=memory)
        stream = memory.create_stream()
        lengths.reset([3, 4], stream=stream)
        memory.capturing = True
        return lengths, memory, stream

    @pytest.mark.parametrize("what", REFUSED)
    def test_host_values_are_refused(self, capturing, what):
        lengths, _, stream = capturing
        with unchanged(lengths), pytest.raises(CaptureError) as caught:
            REFUSED[what](lengths, stream)
        assert str(caught.value) == f"{what} cannot be captured: its host values would be frozen into the CUDA graph. {self.HINT}"

    def test_reading_the_lengths_is_refused(self, capturing):
        lengths, _, stream = capturing
        with unchanged(lengths), pytest.raises(CaptureError) as caught:
            lengths.sync_lengths(stream=stream)
        assert str(caught.value) == f"sync_lengths cannot be captured: it waits for the device. {self.HINT}"

    def test_a_number_is_captured_and_leaves_the_mirror_alone(self, capturing):
        lengths, memory, stream = capturing
        lengths.commit(2, stream=stream)
        assert (lengths.host, device(lengths)) == ((3, 4), [5, 6])
        memory.capturing = False
        lengths.replayed(2)
        assert lengths.host == (5, 6)

    def test_a_device_tensor_is_captured_and_leaves_the_mirror_alone(self, capturing):
        lengths, memory, stream = capturing
        lengths.commit(on_device(memory, [1, 2], stream), max_increment=3, stream=stream)
        assert (lengths.host, device(lengths)) == ((3, 4), [4, 6])
        memory.capturing = False
        lengths.replayed(3, exact=False)
        assert lengths.upper_bounds == (6, 7)

    def test_capacity_is_a_matter_of_the_replay(self, capturing):
        lengths, _, stream = capturing
        lengths.commit(S - 1, stream=stream)
        with pytest.raises(CapacityError):
            lengths.replayed(S - 1)
        assert lengths.host == (3, 4)


INT32 = "int32 values on the host"
#: Called on lengths [3, 4] of B=4, S=10: what, error, parts.
BAD = [
    ("reset", ([1] * 5,), RangeError, ("reuse_lengths", "at most max_batch_size=4 lengths", 5)),
    ("reset", ([0, S + 1],), RangeError, ("reuse_lengths[1]", "0 to 10", 11)),
    ("reset", ([-1],), RangeError, ("reuse_lengths[0]", "0 to 10", -1)),
    ("reset", ([1.0],), RangeError, ("reuse_lengths[0]", "integer", "1.0")),
    ("reset", ([True],), RangeError, ("reuse_lengths[0]", "integer", "True")),
    ("reset", ([[1, 2]],), RangeError, ("reuse_lengths[0]", "integer", "[1, 2]")),
    ("reset", (np.array([1.0]),), DTypeError, ("reuse_lengths", INT32, "float64")),
    ("reset", (np.array([True]),), DTypeError, ("reuse_lengths", INT32, "bool")),
    ("reset", (np.array([[1, 2]]),), ShapeError, ("reuse_lengths", "(n,)", "(1, 2)")),
    ("reset", (3,), ShapeError, ("reuse_lengths", "(n,)", "()")),
    ("reset", ("12",), DTypeError, ("reuse_lengths", INT32, "str")),
    ("reset", (None,), DTypeError, ("reuse_lengths", INT32, "object")),
    ("commit", (-1,), RangeError, ("increment", "at least 0", -1)),
    ("commit", (1.0,), RangeError, ("increment", "integer", "1.0")),
    ("commit", (np.array(1.5),), RangeError, ("increment", "integer", "array(1.5)")),
    ("commit", (True,), RangeError, ("increment", "integer", "True")),
    ("commit", (None,), RangeError, ("increment", "integer", "None")),
    ("commit", ("1",), DTypeError, ("increment", INT32, "str")),
    ("commit", (7,), CapacityError, ("slot 1 holds 4 tokens; committing 7 more exceeds max_sequence_length=10",)),
    ("commit", ([8, 0],), CapacityError, ("slot 0 holds 3 tokens; committing 8 more exceeds max_sequence_length=10",)),
    (
        "commit",
        (2**40,),
        CapacityError,
        (f"slot 0 holds 3 tokens; committing {2**40} more exceeds max_sequence_length=10",),
    ),
    ("commit", ([1],), ShapeError, ("increment", "one value for each of 2 active slots", 1)),
    ("commit", ([1, 1, 1],), ShapeError, ("increment", "one value for each of 2 active slots", 3)),
    ("commit", ([1, -1],), RangeError, ("increment[1]", "at least 0", -1)),
    ("commit", ([1, 0.5],), RangeError, ("increment[1]", "integer", "0.5")),
    ("commit", (np.array([1.0, 1.0]),), DTypeError, ("increment", INT32, "float64")),
    ("commit", (np.array([[1, 1]]),), ShapeError, ("increment", "(n,)", "(1, 2)")),
    ("set_active_batch_size", (5,), RangeError, ("active batch size", "0 to 4", 5)),
    ("set_active_batch_size", (-1,), RangeError, ("active batch size", "0 to 4", -1)),
    ("set_active_batch_size", (1.0,), RangeError, ("active batch size", "integer", "1.0")),
    ("clear_slot", (2,), SlotError, ("slot 2", "0 <= slot < 2")),
    ("clear_slot", (-1,), SlotError, ("slot -1", "0 <= slot < 2")),
    ("clear_slot", (0.0,), SlotError, ("slot", "integer", "0.0")),
    ("rewind", (2, 0), SlotError, ("slot 2", "0 <= slot < 2")),
    ("rewind", (-1, 0), SlotError, ("slot -1", "0 <= slot < 2")),
    ("rewind", (1, 5), RangeError, ("rewind: slot 1 holds 4 tokens", "0 to 4", 5)),
    ("rewind", (1, -1), RangeError, ("rewind: slot 1 holds 4 tokens", "0 to 4", -1)),
    ("rewind", (1, 1.0), RangeError, ("length", "integer", "1.0")),
]


@pytest.mark.parametrize(("operation", "arguments", "error", "parts"), BAD, ids=[f"{b[0]}{b[1]!r:.24}" for b in BAD])
def test_bad_arguments_change_nothing(lengths, stream, operation, arguments, error, parts):
    lengths.reset([3, 4], stream=stream)
    with unchanged(lengths), raises(error, *parts):
        getattr(lengths, operation)(*arguments, stream=stream)


def test_bad_device_tensors_change_nothing(lengths, memory, stream):
    lengths.reset([3, 4], stream=stream)
    good = on_device(memory, [1, 1], stream)
    columns = on_device(memory, [[1, 9], [1, 9]], stream)
    host = HostMemory()
    elsewhere = host.to_device(np.array([1, 1], np.int32), stream=host.create_stream())
    cases = [
        (good, None, RangeError, ("max_increment", "with a device tensor")),
        (good, -1, RangeError, ("max_increment", "at least 0", -1)),
        (good, 1.0, RangeError, ("max_increment", "integer", "1.0")),
        (good, 7, CapacityError, ("slot 1 holds 4 tokens; committing 7 more exceeds max_sequence_length=10",)),
        (good[:1], 1, ShapeError, ("increment", "(2,), one per active slot", "(1,)")),
        (columns, 1, ShapeError, ("increment", "(2,), one per active slot", "(2, 2)")),
        (on_device(memory, [1, 1], stream, np.int64), 1, DTypeError, ("increment", "int32", "int64")),
        (elsewhere, 1, PlaceError, ("increment", f"tensor of {memory.device}", "one of cpu")),
    ]
    for tensor, limit, error, parts in cases:
        with unchanged(lengths), raises(error, *parts):
            lengths.commit(tensor, max_increment=limit, stream=stream)
    with (
        unchanged(lengths),
        raises(RangeError, "max_increment", expected="device tensor"),
    ):
        lengths.commit(1, max_increment=1, stream=stream)
    with (
        unchanged(lengths),
        raises(PlaceError, "reuse_lengths", expected=("int32", "host"), got=f"DeviceTensor((2,), int32, {memory.device})"),
    ):
        lengths.reset(good, stream=stream)


OPERATIONS = {
    "reset": ([1, 2],),
    "commit": (1,),
    "set_active_batch_size": (3,),
    "clear_slot": (0,),
    "rewind": (0, 0),
    "sync_lengths": (),
    "compact": ([1, 0], 2, 2),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_stream_is_asked_for_by_name_and_must_be_one(lengths, stream, operation):
    lengths.reset([3, 4], stream=stream)
    arguments = OPERATIONS[operation]
    with unchanged(lengths):
        for wrong in (None, 0, object()):
            with pytest.raises(PlaceError, match=r"^stream: expected"):
                getattr(lengths, operation)(*arguments, stream=wrong)
        with pytest.raises(TypeError, match="stream"):
            getattr(lengths, operation)(*arguments)
        with pytest.raises(TypeError, match="positional"):
            getattr(lengths, operation)(*arguments, stream)


def test_other_forms_check_the_stream_too(lengths, memory, stream):
    lengths.reset([3, 4], stream=stream)
    increments = on_device(memory, [1, 1], stream)
    with unchanged(lengths):
        for call in (
            lambda: lengths.commit([1, 1], stream=None),
            lambda: lengths.commit(increments, max_increment=1, stream=None),
            lambda: lengths.set_active_batch_size(1, stream=None),
            lambda: lengths.reset([], stream=None),
        ):
            with pytest.raises(PlaceError, match=r"^stream: expected"):
                call()


@pytest.mark.parametrize("active", [0, 2])
def test_closed(memory, stream, active):
    lengths = Lengths(B, S, memory=memory)
    lengths.reset([3] * active, stream=stream)
    lengths.close()
    for operation, arguments in [*OPERATIONS.items(), ("set_active_batch_size", (0,))]:
        with pytest.raises(ClosedError, match=r"^these Lengths are closed\.$"):
            getattr(lengths, operation)(*arguments, stream=stream)
    with pytest.raises(ClosedError, match=r"^these Lengths are closed\.$"):
        lengths.replayed(0)
    assert lengths.active_batch_size == active
    with pytest.raises(ClosedError):
        _ = lengths.tensor.ptr


def test_addresses_never_change(lengths, memory, stream):
    address = lengths.tensor.ptr
    lengths.reset([3, 4], stream=stream)
    lengths.commit(1, stream=stream)
    lengths.commit([1, 0], stream=stream)
    lengths.commit(on_device(memory, [0, 1], stream), max_increment=1, stream=stream)
    lengths.sync_lengths(stream=stream)
    lengths.set_active_batch_size(4, stream=stream)
    lengths.clear_slot(0, stream=stream)
    lengths.rewind(1, 1, stream=stream)
    assert lengths.tensor.ptr == lengths.active_tensor.ptr == address


def test_a_failing_wait_releases_the_tensor():
    class Failing(HostMemory):
        def synchronize(self, stream):
            raise RuntimeError("the device is gone")

    memory = Failing()
    with pytest.raises(RuntimeError, match="the device is gone"):
        Lengths(B, S, memory=memory)
    assert memory.live_nbytes == 0


def test_sync_refuses_a_length_that_cannot_be(memory, stream):
    lengths = Lengths(2, 5, memory=memory)
    lengths.reset([3, 1], stream=stream)
    lengths.commit(memory.to_device(np.array([1, 9], np.int32), stream=stream), max_increment=1, stream=stream)
    with raises(LengthsUnknown, "slot 1", expected="0 to 5 on the device", got=10):
        lengths.sync_lengths(stream=stream)
    assert lengths.upper_bounds == (4, 2)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_lengths_cannot_be_copied(duplicate, memory):
    with pytest.raises(TypeError, match="a Lengths owns memory, or shares it, and cannot be copied or pickled"):
        duplicate(Lengths(2, 5, memory=memory))
