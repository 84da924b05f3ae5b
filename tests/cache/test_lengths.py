"""``Lengths``: what each operation does to the device tensor, the host mirror and the active batch size.

What is refused is in test_bad_inputs.py.
"""

import numpy as np
import pytest

from tests.helpers.cache_cases import CapturingMemory, on_device
from trt_kvcache import HostMemory, Lengths
from trt_kvcache.errors import CapacityError, ConfigError, LengthsUnknown, SlotError

B, S = 4, 10


@pytest.fixture
def lengths(memory):
    lengths = Lengths(B, S, memory=memory)
    yield lengths
    lengths.close()


def device(lengths):
    """The lengths of the active slots, as the device has them."""
    return lengths.active_tensor.numpy().tolist()


def check(lengths, *expected):
    """The device holds these lengths in its active slots, and the host knows them."""
    assert (device(lengths), lengths.host, lengths.upper_bounds) == (list(expected), expected, expected)
    assert lengths.active_batch_size == len(expected)
    assert lengths.all_empty is (not any(expected))


def check_bounds(lengths, *bounds, unknown):
    """The host knows bounds; which lengths it does not know is in what it says."""
    assert lengths.upper_bounds == bounds
    with pytest.raises(LengthsUnknown) as caught:
        _ = lengths.host
    assert str(caught.value) == (
        f"the lengths of slots {unknown} were changed by values that only the device has. Call sync_lengths(stream=) to read them."
    )


@pytest.mark.parametrize(("batch", "nbytes"), [(1, 256), (64, 256), (65, 512)])
def test_bytes_are_padded_and_live(memory, batch, nbytes):
    lengths = Lengths(batch, S, memory=memory)
    assert Lengths.nbytes_for(batch) == lengths.nbytes == memory.live_nbytes == nbytes
    assert lengths.tensor.ptr % 256 == 0
    for _ in range(2):
        lengths.close()
    for sizes in ((0, S), (B, 2**31), (True, S), (B, None)):
        with pytest.raises(ConfigError, match=r"^max_\w+: expected an integer"):
            Lengths(*sizes, memory=memory)
    assert memory.live_nbytes == 0


def test_a_failing_wait_releases_the_tensor():
    class Failing(HostMemory):
        def synchronize(self, stream):
            raise RuntimeError("the device is gone")

    memory = Failing()
    with pytest.raises(RuntimeError) as caught:  # what is kept keeps what the constructor had
        Lengths(B, S, memory=memory)
    assert (str(caught.value), memory.live_nbytes) == ("the device is gone", 0)


@pytest.mark.parametrize("values", [(3, 0, 10), np.array([3, 0, 10], np.uint8)])
def test_reset_sets_lengths_and_active_batch(lengths, stream, values):
    lengths.reset([1, 2, 3, 4], stream=stream)
    lengths.reset(values, stream=stream)
    check(lengths, 3, 0, 10)
    lengths.commit([1, 1, 0], stream=stream)
    assert list(values) == [3, 0, 10]  # the caller's own
    assert all(type(length) is int for length in lengths.host)
    for empty in ([0, 0, 0], []):
        lengths.reset(empty, stream=stream)
        check(lengths, *empty)


def test_commit_of_a_device_tensor_makes_the_mirror_a_bound(lengths, memory, stream):
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


def test_commit_of_a_length_that_cannot_be_is_found_by_sync(lengths, memory, stream):
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


def test_what_is_unknown_stays_unknown_and_what_is_new_is_known(lengths, memory, stream):
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


@pytest.mark.parametrize("on_the_device", [False, True])
def test_capture_and_replay_of_a_commit(on_the_device):
    """A capture leaves the mirror alone; a replay moves it, and not the device."""
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
