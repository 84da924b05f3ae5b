"""States of a cache: zeroed for new sequences, copied back, and the two buffers of ``ping_pong``."""

import numpy as np
import pytest

from tests.cache.scene import PING_PONG, WITH_STATES, driver_calls
from tests.helpers.assertions import raises
from tests.helpers.caches import Image, Unchanged, fill_all, make_cache, states_of, whole
from tests.simt.standin import ALLOCATIONS, WAITS, needs_standin
from trt_kvcache import HostMemory
from trt_kvcache.errors import (
    ConfigError,
    PlaceError,
    RangeError,
    SlotError,
)


@WITH_STATES
@PING_PONG
def test_states_start_as_zero(kind, ping_pong):
    class Stale(HostMemory):
        def allocate(self, nbytes, *, zeroed=False, stream):
            allocation = super().allocate(nbytes, zeroed=zeroed, stream=stream)
            if not zeroed:
                allocation.storage[:] = 0x7F
            return allocation

    with make_cache(kind, Stale(), ping_pong=ping_pong) as cache:
        for _ in range(2):
            assert not any(whole(tensor).numpy().any() for tensor in states_of(cache))
            cache.swap()


@WITH_STATES
@PING_PONG
class TestWhatIsZeroed:
    """In the current states, and of slots that start without a token, alone."""

    def check(self, cache, stream, call, *slots):
        for parity in (0, 1):
            cache.reset_for_new_sequences([3, 5, 2], stream=stream)
            fill_all(cache, stream, parity)
            expected = Image(cache)
            expected.zero_states(*slots)
            call(cache)
            expected.check(cache)
            cache.swap()

    def test_by_reset(self, memory, stream, kind, ping_pong):
        with make_cache(kind, memory, ping_pong=ping_pong) as cache:
            reset = cache.reset_for_new_sequences
            self.check(cache, stream, lambda cache: reset([0, 3, 0, 0], stream=stream), 0, 2, 3)
            self.check(cache, stream, lambda cache: reset([0] * 5, stream=stream), 0, 1, 2, 3, 4)
            self.check(cache, stream, lambda cache: reset([1, 7], stream=stream))
            self.check(cache, stream, lambda cache: reset([], stream=stream))

    def test_where_the_active_batch_grows(self, memory, stream, kind, ping_pong):
        with make_cache(kind, memory, ping_pong=ping_pong) as cache:
            resize = cache.set_active_batch_size
            self.check(cache, stream, lambda cache: resize(5, stream=stream), 3, 4)
            self.check(cache, stream, lambda cache: resize(3, stream=stream))
            self.check(cache, stream, lambda cache: resize(1, stream=stream))
            self.check(cache, stream, lambda cache: [resize(1, stream=stream), resize(2, stream=stream)], 1)

    def test_by_clear_slot(self, memory, stream, kind, ping_pong):
        with make_cache(kind, memory, ping_pong=ping_pong) as cache:
            self.check(cache, stream, lambda cache: cache.clear_slot(1, stream=stream), 1)

    def test_by_clear(self, memory, stream, kind, ping_pong):
        with make_cache(kind, memory, ping_pong=ping_pong) as cache:
            cache.reset_for_new_sequences([3, 5], stream=stream)
            fill_all(cache, stream)
            lengths = cache.host_kv_cache_lengths
            rows, other = Image(cache), [whole(tensor).numpy() for tensor in self.other(cache)]
            cache.clear_mamba_states(stream=stream)
            assert not any(whole(tensor).numpy().any() for tensor in states_of(cache))
            rows.zero_states(0, 1, 2, 3, 4)
            assert all(np.array_equal(now, then) for now, then in zip(Image(cache).rows, rows.rows, strict=True))
            if ping_pong:
                assert all(np.array_equal(whole(tensor).numpy(), then) for tensor, then in zip(self.other(cache), other, strict=True))
            assert cache.host_kv_cache_lengths == lengths

    def other(self, cache):
        cache.swap()
        found = states_of(cache)
        cache.swap()
        return found

    def test_by_nothing_else(self, memory, stream, kind, ping_pong):
        def others(cache):
            cache.commit_sequence_length(1, stream=stream)
            cache.commit_sequence_length([1, 0, 0], stream=stream)
            increments = memory.to_device(np.array([0, 0, 1], np.int32), stream=stream)
            cache.commit_sequence_length(increments, max_increment=1, stream=stream)
            cache.sync_lengths(stream=stream)

        with make_cache(kind, memory, ping_pong=ping_pong) as cache:
            self.check(cache, stream, others)


@WITH_STATES
def test_states_cannot_be_rewound(memory, stream, kind):
    with make_cache(kind, memory) as cache:
        cache.reset_for_new_sequences([3, 5], stream=stream)
        fill_all(cache, stream)
        for length in (0, 2, 5):
            with Unchanged(cache), pytest.raises(ConfigError) as caught:
                cache.rewind(1, length, stream=stream)
            assert str(caught.value) == (
                "rewind: recurrent states cannot go back to an earlier token. Restore captured ones, or clear_slot."
            )
        assert cache.lengths.is_recurrent


@WITH_STATES
class TestPingPong:
    def test_swap_exchanges_current_and_next(self, memory, kind):
        with make_cache(kind, memory, ping_pong=True) as cache:
            first = Image(cache)
            addresses = [[tensor.ptr for tensor in tensors] for tensors in (first.tensors[1], first.tensors[2])]
            assert not {*addresses[0]} & {*addresses[1]}
            for parity in (1, 0, 1):
                cache.swap()
                addresses.reverse()
                now = Image(cache)
                assert [[tensor.ptr for tensor in tensors] for tensors in (now.tensors[1], now.tensors[2])] == addresses
                assert cache.parity == parity

    def test_without_it_nothing_is_swapped_or_copied(self, memory, stream, kind):
        with make_cache(kind, memory) as cache:
            cache.reset_for_new_sequences([3, 5], stream=stream)
            fill_all(cache, stream)
            with Unchanged(cache):
                cache.swap()
                cache.copy_back(0, 2, stream=stream)
            assert cache.parity == 0

    @pytest.mark.parametrize(("slot", "count"), [(0, 2), (1, 2), (2, 1), (0, 3), (1, 0)])
    def test_a_sub_batch_is_copied_back(self, memory, stream, kind, slot, count):
        with make_cache(kind, memory, ping_pong=True) as cache:
            cache.reset_for_new_sequences([3, 5, 2], stream=stream)
            for parity in (0, 1):
                fill_all(cache, stream, parity)
                expected = Image(cache)
                for state, following in zip(expected.states, expected.next_states, strict=True):
                    state[slot : slot + count] = following[slot : slot + count]
                cache.copy_back(slot, count, stream=stream)
                expected.check(cache)
                cache.swap()

    @pytest.mark.parametrize("slot", [1, 4])
    def test_the_states_that_are_kept_go_into_the_next_buffer(self, memory, stream, kind, slot):
        with make_cache(kind, memory, ping_pong=True) as cache:
            cache.reset_for_new_sequences([3, 5, 2], stream=stream)
            for parity in (0, 1):
                fill_all(cache, stream, parity)
                expected = Image(cache)
                for state, following in zip(expected.states, expected.next_states, strict=True):
                    following[slot] = state[slot]
                cache.keep_states(slot, stream=stream)
                expected.check(cache)
                cache.swap()

    def test_rows_that_are_not_active_are_refused(self, memory, stream, kind):
        bad = [
            (3, 0, SlotError, "slot 3: expected 0 <= slot < 3 (active slots). Slots never wrap."),
            (-1, 1, SlotError, "slot -1: expected 0 <= slot < 3 (active slots). Slots never wrap."),
            (1, 3, RangeError, "count: expected at most 2 active slots from slot 1 on, got 3."),
            (1, -1, RangeError, "count: expected at least 0, got -1."),
            (1, 1.0, RangeError, "count: expected an integer, got 1.0."),
        ]
        for ping_pong in (False, True):
            with make_cache(kind, memory, ping_pong=ping_pong) as cache:
                cache.reset_for_new_sequences([3, 5, 2], stream=stream)
                fill_all(cache, stream)
                for slot, count, error, text in bad:
                    with Unchanged(cache), pytest.raises(error) as caught:
                        cache.copy_back(slot, count, stream=stream)
                    assert str(caught.value) == text
                with Unchanged(cache), pytest.raises(PlaceError, match=r"^stream: expected"):
                    cache.copy_back(0, 1, stream=None)

    def test_a_step_of_all_and_a_step_of_some(self, memory, stream, kind):
        """The way a session goes: enqueues add 1 to the states, of all slots and of some; slots come and go between them."""
        with make_cache(kind, memory, ping_pong=True) as cache:
            cache.reset_for_new_sequences([0, 0, 0], stream=stream)
            counts = [0, 0, 0]

            def enqueue(start, stop):
                pairs = zip(states_of(cache), Image(cache).tensors[2], strict=True)
                for current, following in pairs:
                    memory.upload(following[start:stop], current.numpy()[start:stop] + 1, stream=stream)
                    memory.synchronize(stream)
                counts[start:stop] = [count + 1 for count in counts[start:stop]]

            def check():
                for tensor in states_of(cache):
                    for slot, count in enumerate(counts):
                        assert (tensor.numpy()[slot] == count).all()

            enqueue(0, 3)
            cache.swap()
            enqueue(1, 2)
            cache.copy_back(1, 1, stream=stream)
            check()
            saved = cache.capture_recurrent_states(1, stream=stream), cache.capture_conv_states(1, stream=stream)
            enqueue(0, 3)
            cache.swap()
            cache.compact_batch([1, -1, 0], 3, 2, stream=stream)
            counts[:] = [counts[2], counts[0]]
            check()
            cache.set_active_batch_size(4, stream=stream)
            counts += [0, 0]
            check()
            cache.restore_recurrent_states(saved[0], 3, stream=stream)
            cache.restore_conv_states(saved[1], 3, stream=stream)
            counts[3] = 2
            enqueue(0, 4)
            cache.swap()
            check()
            assert counts == [3, 3, 1, 3]


@WITH_STATES
class TestKeepStates:
    """A slot that leaves the active batch keeps its states, however often those of the others are swapped."""

    def test_current_states_are_next_ones_too(self, memory, stream, kind):
        with make_cache(kind, memory, ping_pong=True) as cache:
            for parity in (0, 1):
                fill_all(cache, stream, parity)
                expected = Image(cache)
                for state, following in zip(expected.states, expected.next_states, strict=True):
                    following[3] = state[3]
                cache.keep_states(3, stream=stream)
                expected.check(cache)
                cache.swap()

    def test_without_ping_pong_nothing_is_copied(self, memory, stream, kind):
        with make_cache(kind, memory) as cache:
            fill_all(cache, stream)
            with Unchanged(cache):
                cache.keep_states(3, stream=stream)

    @pytest.mark.parametrize("ping_pong", [False, True])
    @pytest.mark.parametrize("slot", [5, -1])
    def test_slots_out_of_range(self, memory, stream, kind, ping_pong, slot):
        with make_cache(kind, memory, ping_pong=ping_pong) as cache:
            fill_all(cache, stream)
            with Unchanged(cache), raises(SlotError, f"slot {slot}", expected="0 <= slot < 5 (batch slots)"):
                cache.keep_states(slot, stream=stream)

    @needs_standin
    def test_it_is_a_launch_for_each_kind_and_neither_waits_nor_allocates(self, memory, stream, kind):
        with make_cache(kind, memory, ping_pong=True) as cache:
            made, launches = driver_calls(lambda: cache.keep_states(1, stream=stream))
            assert launches == (1 if kind == "conv" else 2)
            assert not {*made} & (WAITS | ALLOCATIONS)


@needs_standin
@WITH_STATES
def test_operations_neither_wait_nor_allocate(memory, stream, kind):
    with make_cache(kind, memory, ping_pong=True) as cache:

        def operations():
            cache.reset_for_new_sequences([0, 3, 0], stream=stream)
            cache.commit_sequence_length(1, stream=stream)
            cache.set_active_batch_size(5, stream=stream)
            cache.clear_slot(1, stream=stream)
            cache.clear_mamba_states(stream=stream)
            cache.swap()
            cache.copy_back(1, 2, stream=stream)

        made, _ = driver_calls(operations)
        assert not {*made} & (WAITS | ALLOCATIONS)
