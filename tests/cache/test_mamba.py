"""``MambaCacheManager``, and what every cache with states does with them. Capture, compaction, and life (with the hybrid
manager's) are in files of their own.
"""

import pytest

from tests.helpers.cache_cases import CapturingMemory, Image, Unchanged, fill_all, make_cache, mamba_config, states_of
from trt_kvcache import MambaCacheManager
from trt_kvcache.errors import CapacityError

WITH_STATES = pytest.mark.parametrize("kind", ["linear", "mamba", "hybrid"])
PING_PONG = pytest.mark.parametrize("ping_pong", [False, True])


@PING_PONG
def test_sizes_and_views(memory, ping_pong):
    config = mamba_config(recurrent_dtype="bfloat16", conv_dtype="float32", ping_pong=ping_pong)
    with MambaCacheManager(config, memory=memory) as cache:
        assert (cache.config, cache.num_layers, cache.num_recurrent_layers, cache.parity) == (config, 2, 2, 0)
        for state, following, shape, dtype in (
            (cache.get_recurrent_state, cache.get_next_recurrent_state, (5, 2, 3, 5), "bfloat16"),  # 5 * 30 * 2 bytes, padded to 512
            (cache.get_conv_state, cache.get_next_conv_state, (5, 7, 3), "float32"),  # 5 * 21 * 4 bytes
        ):
            for get in (state, following):
                layers = [get(index) for index in range(2)]
                assert [(layer.shape, layer.dtype, layer.is_contiguous, layer.ptr % 256) for layer in layers] == [
                    (shape, dtype, True, 0)
                ] * 2
                assert layers[1].ptr - layers[0].ptr == 512
            assert (state(0).ptr == following(0).ptr) is (not ping_pong)
        buffers = 2 if ping_pong else 1
        assert cache.nbytes == config.nbytes == buffers * 2 * (512 + 512)


@WITH_STATES
@PING_PONG
def test_clear_zeroes_all_current_states_padding_included_and_not_the_lengths(memory, stream, kind, ping_pong):
    with make_cache(kind, memory, ping_pong=ping_pong) as cache:
        for parity in (0, 1):
            cache.reset_for_new_sequences([3, 5, 2], stream=stream)
            fill_all(cache, stream, parity)
            expected = Image(cache)
            expected.clear_states()
            cache.clear_mamba_states(stream=stream)
            expected.check(cache)
            assert cache.host_kv_cache_lengths == (3, 5, 2)
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
