"""``MambaCacheManager``: states alone, and their lengths."""

import pytest

from tests.cache.scene import PING_PONG
from tests.helpers.assertions import raises
from tests.helpers.caches import CapturingMemory, Image, Unchanged, fill_all, kv_config, make_cache, mamba_config, states_of
from trt_kvcache import HostMemory, KVCacheManager, Lengths, MambaCacheManager, estimate_memory
from trt_kvcache.errors import (
    CapacityError,
    CaptureError,
    ConfigError,
    LayerIndexError,
    PlaceError,
)


def test_what_it_says_about_itself(memory):
    config = mamba_config()
    with MambaCacheManager(config, memory=memory) as cache:
        assert cache.config is config
        assert (cache.num_layers, cache.num_recurrent_layers, cache.memory, cache.closed) == (2, 2, memory, False)
        assert (cache.max_batch_size, cache.active_batch_size, cache.kv_cache_all_empty, cache.parity) == (5, 0, True, 0)
        assert cache.nbytes == config.nbytes == estimate_memory(config).nbytes
    assert cache.closed


def test_there_are_no_attention_layers(memory):
    with make_cache("mamba", memory) as cache:
        assert (cache.kv_config, cache.kv_head_dim_groups) == (None, ())


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


def test_clear_is_the_name_of_the_standalone_manager(memory, stream):
    with make_cache("mamba", memory) as cache:
        fill_all(cache, stream)
        cache.clear(stream=stream)
        assert not any(tensor.numpy().any() for tensor in states_of(cache))


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
        with raises(ConfigError, "lengths", expected="5 slots of 7 tokens", got="4 slots of 7"):
            MambaCacheManager(mamba_config(), memory=memory, lengths=lengths)
        lengths.close()
        with pytest.raises(PlaceError, match="lengths in another one"):
            MambaCacheManager(mamba_config(), memory=memory, lengths=Lengths(5, 7, memory=HostMemory()))
        assert memory.live_nbytes == before


def test_layers_out_of_range(memory):
    with make_cache("mamba", memory) as cache:
        for get in (cache.get_recurrent_state, cache.get_conv_state, cache.get_next_recurrent_state, cache.get_next_conv_state):
            for index in (2, -1):
                with raises(LayerIndexError, f"recurrent_layer_idx {index}", expected="0 <= recurrent_layer_idx < 2"):
                    get(index)


@pytest.mark.parametrize("config", [None, {}, kv_config()], ids=["None", "dict", "KVCacheConfig"])
def test_of_something_else_than_its_configuration(memory, config):
    with raises(ConfigError, "MambaCacheManager", expected="MambaCacheConfig"):
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
