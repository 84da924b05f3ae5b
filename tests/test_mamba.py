"""``MambaCacheManager``, and what every cache with states does with them. Capture, compaction, and life (with the hybrid
manager's) are in files of their own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cache_cases import CapturingMemory, Image, Unchanged, fill_all, kv_config, make_cache, mamba_config, states_of
from simt.standin import ALLOCATIONS, WAITS, StandIn, needs_standin

from trt_kvcache import KVCacheManager, Lengths, MambaCacheManager, estimate_memory
from trt_kvcache.errors import CapacityError, ConfigError

WITH_STATES = pytest.mark.parametrize("kind", ["linear", "mamba", "hybrid"])
PING_PONG = pytest.mark.parametrize("ping_pong", [False, True])


@PING_PONG
def test_sizes_and_views(memory, ping_pong):
    config, before = mamba_config(recurrent_dtype="bfloat16", conv_dtype="float32", ping_pong=ping_pong), memory.live_nbytes
    with MambaCacheManager(config, memory=memory) as cache:
        assert (cache.config, cache.num_layers, cache.num_recurrent_layers, cache.memory, cache.closed) == (config, 2, 2, memory, False)
        assert (cache.max_batch_size, cache.active_batch_size, cache.kv_cache_all_empty, cache.parity) == (5, 0, True, 0)
        for state, following, shape, dtype, step in (
            (cache.get_recurrent_state, cache.get_next_recurrent_state, (5, 2, 3, 5), "bfloat16", 512),  # 5 * 30 * 2 bytes, padded
            (cache.get_conv_state, cache.get_next_conv_state, (5, 7, 3), "float32", 512),  # 5 * 21 * 4
        ):
            for get in (state, following):
                layers = [get(index) for index in range(2)]
                assert [(layer.shape, layer.dtype, layer.is_contiguous, layer.ptr % 256) for layer in layers] == [
                    (shape, dtype, True, 0)
                ] * 2
                assert layers[1].ptr - layers[0].ptr == step
            assert (state(0).ptr == following(0).ptr) is (not ping_pong)
        buffers = 2 if ping_pong else 1
        assert cache.nbytes == config.nbytes == estimate_memory(config).nbytes == buffers * 2 * (512 + 512)
        infos = 2 * 3 * 8 * 2 * buffers  # for the kernels: layers, words, bytes, kinds
        assert memory.live_nbytes - before == cache.nbytes + cache.lengths.nbytes + infos
    assert (cache.closed, memory.live_nbytes) == (True, before)


def commits(cache: Any, stream: Any) -> None:
    cache.commit_sequence_length(1, stream=stream)
    cache.commit_sequence_length([1, 0, 0], stream=stream)
    cache.commit_sequence_length(cache.memory.to_device(np.array([0, 0, 1], np.int32), stream=stream), max_increment=1, stream=stream)
    cache.sync_lengths(stream=stream)


# On three active slots: operation, and the slots whose current states are zero afterwards.
ZEROING: dict[str, tuple[Any, Any]] = {
    "some start empty": (lambda cache, stream: cache.reset_for_new_sequences([0, 3, 0, 0], stream=stream), (0, 2, 3)),
    "all start empty": (lambda cache, stream: cache.reset_for_new_sequences([0] * 5, stream=stream), range(5)),
    "none starts empty": (lambda cache, stream: cache.reset_for_new_sequences([1, 7], stream=stream), ()),
    "none starts": (lambda cache, stream: cache.reset_for_new_sequences([], stream=stream), ()),
    "grow": (lambda cache, stream: cache.set_active_batch_size(5, stream=stream), (3, 4)),
    "stay": (lambda cache, stream: cache.set_active_batch_size(3, stream=stream), ()),
    "shrink": (lambda cache, stream: cache.set_active_batch_size(1, stream=stream), ()),
    "shrink and grow": (lambda cache, stream: [cache.set_active_batch_size(size, stream=stream) for size in (1, 2)], (1,)),
    "clear a slot": (lambda cache, stream: cache.clear_slot(1, stream=stream), (1,)),
    "commit": (commits, ()),
    "clear all": (lambda cache, stream: cache.clear_mamba_states(stream=stream), None),
}


@WITH_STATES
@PING_PONG
@pytest.mark.parametrize("name", list(ZEROING))
def test_what_is_zeroed(memory, stream, kind, ping_pong, name):
    """The current states of slots that start without a token, alone; or all, padding included, and not the lengths."""
    operation, slots = ZEROING[name]
    with make_cache(kind, memory, ping_pong=ping_pong) as cache:
        for parity in (0, 1):
            cache.reset_for_new_sequences([3, 5, 2], stream=stream)
            fill_all(cache, stream, parity)
            expected = Image(cache)
            expected.clear_states() if slots is None else expected.zero_states(*slots)
            operation(cache, stream)
            expected.check(cache)
            assert slots is not None or cache.host_kv_cache_lengths == (3, 5, 2)
            cache.swap()


@WITH_STATES
class TestPingPong:
    def test_swap_exchanges_current_and_next(self, memory, kind):
        with make_cache(kind, memory, ping_pong=True) as cache:
            addresses = [[tensor.ptr for tensor in tensors] for tensors in Image(cache).tensors[1:]]
            assert not {*addresses[0]} & {*addresses[1]}
            for parity in (1, 0, 1):
                cache.swap()
                addresses.reverse()
                assert [[tensor.ptr for tensor in tensors] for tensors in Image(cache).tensors[1:]] == addresses
                assert cache.parity == parity

    def test_without_it_nothing_is_swapped_or_copied(self, memory, stream, kind):
        with make_cache(kind, memory) as cache:
            cache.reset_for_new_sequences([3, 5], stream=stream)
            fill_all(cache, stream)
            with Unchanged(cache):
                cache.swap()
                cache.copy_back(0, 2, stream=stream)

    def test_a_sub_batch_is_copied_back(self, memory, stream, kind):
        with make_cache(kind, memory, ping_pong=True) as cache:
            cache.reset_for_new_sequences([3, 5, 2], stream=stream)
            for seed, (slot, count) in enumerate([(0, 2), (1, 2), (2, 1), (0, 3), (1, 0)]):
                fill_all(cache, stream, seed)
                expected = Image(cache)
                for state, following in zip(expected.states, expected.next_states, strict=True):
                    state[slot : slot + count] = following[slot : slot + count]
                cache.copy_back(slot, count, stream=stream)
                expected.check(cache)
                cache.swap()


def test_it_counts_to_the_largest_int32(memory, stream):
    with make_cache("mamba", memory) as cache:
        cache.reset_for_new_sequences([0, 2**31 - 2], stream=stream)
        cache.commit_sequence_length(1, stream=stream)
        assert cache.kv_cache_lengths.numpy().tolist() == [1, 2**31 - 1]
        with Unchanged(cache), pytest.raises(CapacityError):
            cache.commit_sequence_length(1, stream=stream)


def test_lengths_of_a_k_v_cache(memory, stream):
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


def test_what_a_graph_can_hold():
    memory = CapturingMemory()
    stream = memory.create_stream()
    with make_cache("mamba", memory, ping_pong=True) as cache:
        cache.reset_for_new_sequences([3, 5], stream=stream)
        fill_all(cache, stream)
        memory.capturing = True
        cache.copy_back(0, 1, stream=stream)
        cache.clear(stream=stream)  # the standalone manager's name for it
        assert not any(tensor.numpy().any() for tensor in states_of(cache))
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
