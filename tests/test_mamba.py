"""``MambaCacheManager``, and what every cache with states does with them. Capture, compaction, and life (with the hybrid
manager's) are in files of their own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cache_cases import CapturingMemory, Image, Unchanged, fill_all, kv_config, make_cache, mamba_config, states_of, whole
from simt.standin import ALLOCATIONS, WAITS, StandIn, needs_standin

from trt_kvcache import HostMemory, KVCacheManager, Lengths, MambaCacheManager, estimate_memory
from trt_kvcache.errors import (
    CapacityError,
    CaptureError,
    ConfigError,
    LayerIndexError,
    PlaceError,
    RangeError,
    SlotError,
)

WITH_STATES = pytest.mark.parametrize("kind", ["linear", "mamba", "hybrid"])
PING_PONG = pytest.mark.parametrize("ping_pong", [False, True])


def test_what_it_says_about_itself(memory):
    config = mamba_config()
    with MambaCacheManager(config, memory=memory) as cache:
        assert cache.config is config
        assert (cache.num_layers, cache.num_recurrent_layers, cache.memory, cache.closed) == (2, 2, memory, False)
        assert (cache.max_batch_size, cache.active_batch_size, cache.kv_cache_all_empty, cache.parity) == (5, 0, True, 0)
        assert cache.nbytes == config.nbytes == estimate_memory(config).nbytes
    assert cache.closed


@PING_PONG
def test_views(memory, ping_pong):
    dtypes = {"recurrent_dtype": "bfloat16", "conv_dtype": "float32"}
    with MambaCacheManager(mamba_config(**dtypes, ping_pong=ping_pong), memory=memory) as cache:
        for state, following, shape, dtype in (
            (cache.get_recurrent_state, cache.get_next_recurrent_state, (5, 2, 3, 5), "bfloat16"),
            (cache.get_conv_state, cache.get_next_conv_state, (5, 7, 3), "float32"),
        ):
            for get in (state, following):
                layers = [get(index) for index in range(2)]
                assert [(layer.shape, layer.dtype, layer.is_contiguous) for layer in layers] == [(shape, dtype, True)] * 2
                assert all(layer.ptr % 256 == 0 for layer in layers)
                assert layers[1].ptr - layers[0].ptr == -(-layers[0].nbytes // 256) * 256
            assert (state(0).ptr == following(0).ptr) is (not ping_pong)


def test_bytes_by_hand(memory):
    # A layer: 5 * 30 * 4 = 600 -> 768 bytes of recurrent states, 5 * 21 * 2 = 210 -> 256 bytes of conv states.
    before = memory.live_nbytes
    for ping_pong, nbytes in ((False, 2 * (768 + 256)), (True, 4 * (768 + 256))):
        with MambaCacheManager(mamba_config(ping_pong=ping_pong), memory=memory) as cache:
            assert cache.nbytes == nbytes
            infos = 2 * 3 * 8 * 2 * (2 if ping_pong else 1)  # for the kernels: layers, words, bytes, kinds, buffers
            assert memory.live_nbytes - before == nbytes + cache.lengths.nbytes + infos
        assert memory.live_nbytes == before


@WITH_STATES
@PING_PONG
def test_states_start_as_zero(kind, ping_pong):
    class Stale(HostMemory):
        def allocate(self, nbytes: int, *, zeroed: bool = False, stream: Any) -> Any:
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

    def check(self, cache: Any, stream: Any, call: Any, *slots: int) -> None:
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

    def other(self, cache: Any) -> list[Any]:
        cache.swap()
        found = states_of(cache)
        cache.swap()
        return found

    def test_by_nothing_else(self, memory, stream, kind, ping_pong):
        def others(cache: Any) -> None:
            cache.commit_sequence_length(1, stream=stream)
            cache.commit_sequence_length([1, 0, 0], stream=stream)
            increments = memory.to_device(np.array([0, 0, 1], np.int32), stream=stream)
            cache.commit_sequence_length(increments, max_increment=1, stream=stream)
            cache.sync_lengths(stream=stream)

        with make_cache(kind, memory, ping_pong=ping_pong) as cache:
            self.check(cache, stream, others)


def test_clear_is_the_name_of_the_standalone_manager(memory, stream):
    with make_cache("mamba", memory) as cache:
        fill_all(cache, stream)
        cache.clear(stream=stream)
        assert not any(tensor.numpy().any() for tensor in states_of(cache))


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

            def enqueue(start: int, stop: int) -> None:
                pairs = zip(states_of(cache), Image(cache).tensors[2], strict=True)
                for current, following in pairs:
                    memory.upload(following[start:stop], current.numpy()[start:stop] + 1, stream=stream)
                    memory.synchronize(stream)
                counts[start:stop] = [count + 1 for count in counts[start:stop]]

            def check() -> None:
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


class TestLengths:
    def test_its_own_count_to_the_largest_int32(self, memory, stream):
        with make_cache("mamba", memory) as cache:
            cache.reset_for_new_sequences([0, 2**31 - 2], stream=stream)
            cache.commit_sequence_length(1, stream=stream)
            assert cache.kv_cache_lengths.numpy().tolist() == [1, 2**31 - 1]
            with Unchanged(cache), pytest.raises(CapacityError):
                cache.commit_sequence_length(1, stream=stream)

    def test_those_of_a_k_v_cache(self, memory, stream):
        lengths = Lengths(5, 7, memory=memory)
        kv = KVCacheManager(kv_config(), memory=memory, lengths=lengths)
        cache = MambaCacheManager(mamba_config(), memory=memory, lengths=lengths)
        fill_all(cache, stream)
        expected = Image(cache)
        expected.zero_states(1)
        kv.reset_for_new_sequences([3, 0], stream=stream)
        expected.check(cache)
        assert cache.host_kv_cache_lengths == (3, 0)
        with Unchanged(cache), pytest.raises(ConfigError, match=r"^rewind: recurrent states cannot"):
            kv.rewind(0, 2, stream=stream)
        cache.close()
        kv.rewind(0, 2, stream=stream)
        assert lengths.host == (2, 0)
        kv.close()
        lengths.close()

    def test_of_another_batch_or_memory_are_refused(self, memory):
        before = memory.live_nbytes
        lengths = Lengths(4, 7, memory=memory)
        with pytest.raises(ConfigError) as caught:
            MambaCacheManager(mamba_config(), memory=memory, lengths=lengths)
        assert str(caught.value) == "lengths: expected those of 5 slots of 7 tokens, got 4 slots of 7."
        lengths.close()
        with pytest.raises(PlaceError, match="another one's"):
            MambaCacheManager(mamba_config(), memory=memory, lengths=Lengths(5, 7, memory=HostMemory()))
        assert memory.live_nbytes == before


def test_layers_out_of_range(memory):
    with make_cache("mamba", memory) as cache:
        for get in (cache.get_recurrent_state, cache.get_conv_state, cache.get_next_recurrent_state, cache.get_next_conv_state):
            for index in (2, -1):
                with pytest.raises(LayerIndexError) as caught:
                    get(index)
                assert str(caught.value) == (f"recurrent_layer_idx {index}: expected 0 <= recurrent_layer_idx < 2. Indices never wrap.")


@pytest.mark.parametrize("config", [None, {}, kv_config()], ids=["None", "dict", "KVCacheConfig"])
def test_of_something_else_than_its_configuration(memory, config):
    with pytest.raises(ConfigError, match=r"^MambaCacheManager: expected a MambaCacheConfig, got "):
        MambaCacheManager(config, memory=memory)


def test_what_a_graph_can_hold():
    memory = CapturingMemory()
    stream = memory.create_stream()
    with make_cache("mamba", memory, ping_pong=True) as cache:
        cache.reset_for_new_sequences([3, 5], stream=stream)
        fill_all(cache, stream)
        memory.capturing = True
        for call in (
            lambda: cache.reset_for_new_sequences([0], stream=stream),
            lambda: cache.set_active_batch_size(3, stream=stream),
            lambda: cache.clear_slot(0, stream=stream),
        ):
            with Unchanged(cache), pytest.raises(CaptureError, match="cannot be captured: its host values"):
                call()
        cache.copy_back(0, 1, stream=stream)
        cache.clear(stream=stream)
        cache.commit_sequence_length(1, stream=stream)
        assert cache.host_kv_cache_lengths == (3, 5)


@needs_standin
@WITH_STATES
def test_operations_neither_wait_nor_allocate(memory, stream, kind):
    with make_cache(kind, memory, ping_pong=True) as cache:
        for _ in range(2):  # the first run loads the kernels
            standin = StandIn()
            cache.reset_for_new_sequences([0, 3, 0], stream=stream)
            cache.commit_sequence_length(1, stream=stream)
            cache.set_active_batch_size(5, stream=stream)
            cache.clear_slot(1, stream=stream)
            cache.clear_mamba_states(stream=stream)
            cache.swap()
            cache.copy_back(1, 2, stream=stream)
            made = standin.take_calls()
        assert not {*made} & (WAITS | ALLOCATIONS)
