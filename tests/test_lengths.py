"""``Lengths``: what each operation does to the device tensor, the host mirror and the active batch size.

What is refused is in test_bad_inputs.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cache_cases import CapturingMemory

from trt_kvcache import HostMemory, Lengths
from trt_kvcache.errors import CapacityError, ConfigError, LengthsUnknown, SlotError

B, S = 4, 10


@pytest.fixture
def lengths(memory):
    lengths = Lengths(B, S, memory=memory)
    yield lengths
    lengths.close()


def device(lengths: Lengths) -> list[int]:
    """The lengths of the active slots, as the device has them."""
    return lengths.active_tensor.numpy().tolist()


def on_device(memory: Any, values: Any, stream: Any) -> Any:
    return memory.to_device(np.array(values, np.int32), stream=stream)


def check(lengths: Lengths, *expected: int) -> None:
    """The device holds these lengths in its active slots, and the host knows them."""
    assert (device(lengths), lengths.host, lengths.upper_bounds) == (list(expected), expected, expected)
    assert lengths.active_batch_size == len(expected)
    assert lengths.all_empty is (not any(expected))


def check_bounds(lengths: Lengths, *bounds: int, unknown: Any) -> None:
    """The host knows bounds; which lengths it does not know is in what it says."""
    assert lengths.upper_bounds == bounds
    with pytest.raises(LengthsUnknown) as caught:
        _ = lengths.host
    assert str(caught.value) == (
        f"the lengths of slots {unknown} were changed by values that only the device has. Call sync_lengths(stream=) to read them."
    )


class TestStart:
    def test_no_slot_is_active_and_all_lengths_are_zero(self, lengths):
        assert (lengths.max_batch_size, lengths.max_sequence_length) == (B, S)
        assert (lengths.tensor.shape, lengths.tensor.dtype, lengths.tensor.numpy().tolist()) == ((B,), "int32", [0] * B)
        check(lengths)

    @pytest.mark.parametrize(("batch", "nbytes"), [(1, 256), (64, 256), (65, 512)])
    def test_bytes_are_padded_and_live(self, memory, batch, nbytes):
        lengths = Lengths(batch, S, memory=memory)
        assert Lengths.nbytes_for(batch) == lengths.nbytes == memory.live_nbytes == nbytes
        assert lengths.tensor.ptr % 256 == 0
        lengths.close()
        lengths.close()
        assert memory.live_nbytes == 0

    @pytest.mark.parametrize("value", [0, -1, 2**31, 2.0, True, "4", None])
    def test_sizes_out_of_range(self, memory, value):
        for name, sizes in (("max_batch_size", (value, S)), ("max_sequence_length", (B, value))):
            with pytest.raises(ConfigError, match=rf"^{name}: expected an integer"):
                Lengths(*sizes, memory=memory)
        assert memory.live_nbytes == 0

    def test_a_failing_wait_releases_the_tensor(self):
        class Failing(HostMemory):
            def synchronize(self, stream: Any) -> None:
                raise RuntimeError("the device is gone")

        memory = Failing()
        with pytest.raises(RuntimeError) as caught:  # what is kept keeps what the constructor had
            Lengths(B, S, memory=memory)
        assert (str(caught.value), memory.live_nbytes) == ("the device is gone", 0)


class TestReset:
    @pytest.mark.parametrize("values", [[3, 0, 10], (3, 0, 10), np.array([3, 0, 10]), np.array([3, 0, 10], np.uint8)])
    def test_sets_lengths_and_active_batch(self, lengths, stream, values):
        lengths.reset([1, 2, 3, 4], stream=stream)
        lengths.reset(values, stream=stream)
        check(lengths, 3, 0, 10)
        lengths.commit([1, 1, 0], stream=stream)
        assert list(values) == [3, 0, 10]  # the caller's own
        assert all(type(length) is int for length in lengths.host)
        for empty in ([0, 0, 0], []):
            lengths.reset(empty, stream=stream)
            check(lengths, *empty)

    def test_makes_the_mirror_exact_again(self, lengths, memory, stream):
        lengths.reset([1, 1], stream=stream)
        lengths.commit(on_device(memory, [1, 0], stream), max_increment=1, stream=stream)
        lengths.reset([2], stream=stream)
        check(lengths, 2)


class TestCommit:
    @pytest.mark.parametrize("increment", [np.int64(7), np.array(7), 7])
    def test_of_a_number_counts_for_the_active_slots_alone(self, lengths, stream, increment):
        lengths.reset([1, 2, 3], stream=stream)
        lengths.set_active_batch_size(2, stream=stream)
        lengths.commit(increment, stream=stream)
        check(lengths, 8, 9)
        assert lengths.tensor.numpy().tolist()[2] == 3

    @pytest.mark.parametrize("values", [[2, 0, 5], (2, 0, 5), np.array([2, 0, 5], np.int32), np.array([2, 9, 0, 9, 5, 9])[::2]])
    def test_of_host_values(self, lengths, stream, values):
        lengths.reset([1, 2, 3], stream=stream)
        lengths.commit(values, stream=stream)
        check(lengths, 3, 2, 8)

    def test_of_a_device_tensor_makes_the_mirror_a_bound(self, lengths, memory, stream):
        lengths.reset([1, 0, 3], stream=stream)
        lengths.commit(on_device(memory, [2, 0, 4], stream), max_increment=5, stream=stream)
        assert device(lengths) == [3, 0, 7]
        check_bounds(lengths, 6, 5, 8, unknown=[0, 1, 2])
        assert not lengths.all_empty
        lengths.commit(1, stream=stream)
        lengths.commit([0, 1, 0], stream=stream)
        check_bounds(lengths, 7, 7, 9, unknown=[0, 1, 2])
        lengths.sync_lengths(stream=stream)
        check(lengths, 4, 2, 8)

    def test_of_nothing(self, lengths, memory, stream):
        for active in ([], [4, 0]):
            lengths.reset(active, stream=stream)
            lengths.commit(0 if active else 3, stream=stream)
            lengths.commit([0] * len(active), stream=stream)
            check(lengths, *active)
            lengths.commit(on_device(memory, [0] * len(active), stream), max_increment=3, stream=stream)
            assert device(lengths) == active

    def test_to_the_last_token_by_the_bound_until_read(self, lengths, memory, stream, unchanged):
        lengths.reset([3, S], stream=stream)
        lengths.commit([S - 3, 0], stream=stream)
        nothing = on_device(memory, [0, 0], stream)
        lengths.commit(nothing, max_increment=0, stream=stream)
        assert device(lengths) == [S, S]
        lengths.reset([2, 2], stream=stream)
        lengths.commit(nothing, max_increment=6, stream=stream)
        for increment, limit in ((3, None), ([0, 3], None), (nothing, 3)):
            with unchanged(lengths), pytest.raises(CapacityError, match=r"slot \d holds at most 8 tokens"):
                lengths.commit(increment, max_increment=limit, stream=stream)
        lengths.sync_lengths(stream=stream)
        lengths.commit(8, stream=stream)
        check(lengths, S, S)

    def test_of_a_length_that_cannot_be_is_found_by_sync(self, lengths, memory, stream):
        lengths.reset([3, 2], stream=stream)
        lengths.commit(on_device(memory, [1, 9], stream), max_increment=1, stream=stream)
        with pytest.raises(LengthsUnknown, match=r"slot 1: expected a length from 0 to 10 on the device, got 11\. A committed tensor"):
            lengths.sync_lengths(stream=stream)
        check_bounds(lengths, 4, 3, unknown=[0, 1])


def test_more_slots_than_one_launch_carries(memory, stream):
    lengths = Lengths(150, 500, memory=memory)
    lengths.reset(range(150), stream=stream)
    lengths.commit(list(range(150, 0, -1)), stream=stream)
    check(lengths, *[150] * 150)
    lengths.commit(on_device(memory, range(150), stream), max_increment=149, stream=stream)
    assert device(lengths) == [150 + slot for slot in range(150)]
    lengths.sync_lengths(stream=stream)
    order = np.random.default_rng(0).permutation(150)
    lengths.compact(order, 150, 150, stream=stream)
    check(lengths, *(150 + order.tolist().index(slot) for slot in range(150)))
    lengths.close()


class TestActiveBatch:
    def test_keeps_the_first_slots_and_new_ones_are_empty_whatever_they_held(self, lengths, stream):
        lengths.reset([3, 4, 5], stream=stream)
        for count, expected in ((2, [3, 4]), (2, [3, 4]), (4, [3, 4, 0, 0]), (1, [3]), (3, [3, 0, 0]), (0, [])):
            lengths.set_active_batch_size(count, stream=stream)
            check(lengths, *expected)

    def test_what_is_unknown_stays_unknown_and_what_is_new_is_known(self, lengths, memory, stream):
        lengths.reset([1, 2], stream=stream)
        lengths.commit(on_device(memory, [1, 1], stream), max_increment=2, stream=stream)
        lengths.set_active_batch_size(1, stream=stream)
        lengths.set_active_batch_size(3, stream=stream)
        assert device(lengths) == [2, 0, 0]
        check_bounds(lengths, 3, 0, 0, unknown=[0])
        assert ([lengths.is_exact(slot) for slot in range(3)], lengths.of_slot(2)) == ([False, True, True], 0)
        with pytest.raises(LengthsUnknown, match=r"^the lengths of slots \[0\] were changed"):
            lengths.of_slot(0)
        for call in (lengths.is_exact, lengths.of_slot):
            with pytest.raises(SlotError, match=r"^slot 3: expected 0 <= slot < 3 \(active slots\)"):
                call(3)
        lengths.rewind(2, 0, stream=stream)
        lengths.clear_slot(0, stream=stream)
        check(lengths, 0, 0, 0)


class TestOneSlot:
    def test_clear(self, lengths, stream):
        lengths.reset([3, 4, 5], stream=stream)
        lengths.clear_slot(1, stream=stream)
        check(lengths, 3, 0, 5)

    @pytest.mark.parametrize("length", [4, 2, 0, np.int32(2)])
    def test_rewind(self, lengths, memory, stream, length):
        lengths.reset([3, 4, 5], stream=stream)
        lengths.rewind(1, length, stream=stream)
        check(lengths, 3, length, 5)
        lengths.commit(on_device(memory, [0, 0, 0], stream), max_increment=1, stream=stream)
        lengths.sync_lengths(stream=stream)
        lengths.rewind(2, 1, stream=stream)
        check(lengths, 3, length, 1)


class TestCaptureAndReplay:
    """A capture leaves the mirror alone; a replay moves it, and not the device."""

    @pytest.mark.parametrize("on_the_device", [False, True])
    def test_of_a_commit(self, on_the_device):
        memory = CapturingMemory()
        lengths, stream = Lengths(B, S, memory=memory), memory.create_stream()
        lengths.reset([3, 4], stream=stream)
        memory.capturing = True
        if on_the_device:
            lengths.commit(on_device(memory, [1, 2], stream), max_increment=S, stream=stream)  # capacity is a matter of the replay
        else:
            lengths.commit(S - 1, stream=stream)
        assert (lengths.host, device(lengths)) == ((3, 4), [4, 6] if on_the_device else [3 + S - 1, 4 + S - 1])
        memory.capturing = False
        with pytest.raises(CapacityError):
            lengths.replayed(S - 1, exact=not on_the_device)
        assert lengths.host == (3, 4)
        lengths.replayed(3, exact=not on_the_device)
        if on_the_device:
            check_bounds(lengths, 6, 7, unknown=[0, 1])
        else:
            assert lengths.host == (6, 7)
