"""``LinearKVCache``: one buffer for all layers, and states. What it shares with other managers is in their files."""

import numpy as np
import pytest

from tests.helpers.assertions import raises
from tests.helpers.caches import LAYOUTS, Image, Unchanged, fill_all, linear_config, make_cache, whole
from trt_kvcache import CacheConfig, KVCacheConfig, KVCacheManager, KVLayerConfig, KVLayout, LinearKVCache, MambaCacheManager
from trt_kvcache.errors import ClosedError, LayerIndexError, ShapeError

FIELDS = {"num_attention_layers": 4, "max_batch_size": 3, "max_sequence_length": 7, "num_kv_heads": 2, "head_dim": 16}


@pytest.fixture(params=list(KVLayout), ids=lambda layout: layout.value)
def cache(request, memory):
    with LinearKVCache(CacheConfig(**FIELDS, layout=request.param), memory=memory) as cache:
        yield cache


def test_what_it_says_about_itself(cache, memory):
    assert cache.config == CacheConfig(**FIELDS, layout=cache.config.layout)
    assert cache.kv_config == cache.config.kv
    assert (cache.num_layers, cache.is_uniform, cache.memory) == (4, True, memory)
    assert cache.get_layer_config(3) == KVLayerConfig(num_kv_heads=2, head_dim=16)


def test_one_allocation_holds_all_layers(cache, memory):
    views = [cache.get_combined_kv_cache(index) for index in range(4)]
    assert len({id(view.allocation) for view in views}) == 1
    (group,) = cache.kv_head_dim_groups
    assert memory.live_nbytes == views[0].allocation.nbytes + cache.lengths.nbytes + group.device_layer_infos.nbytes


def test_layers_lie_one_behind_the_other(cache):
    views = [cache.get_combined_kv_cache(index) for index in range(4)]
    step = {KVLayout.COMBINED: 2816, KVLayout.SEPARATE: 3072}[cache.config.layout]
    assert [view.ptr - views[0].ptr for view in views] == [0, step, 2 * step, 3 * step]
    assert (cache.nbytes, views[0].ptr % 256) == (4 * step, 0)


def test_the_buffer_is_all_layers(cache):
    buffer = cache.kv_cache_buffer
    if cache.config.layout is KVLayout.COMBINED:
        assert buffer.shape == (4, 3, 2, 2, 7, 16)  # [L, B, 2, H, S, D]
        assert buffer.strides == (1408, 448, 224, 112, 16, 1)  # a layer of 1344 elements, padded
    else:
        assert buffer.shape == (4, 2, 3, 2, 7, 16)  # [L, 2, B, H, S, D]
        assert buffer.strides == (1536, 768, 224, 112, 16, 1)  # K of 672 elements, padded


def test_the_buffer_starts_where_the_first_layer_does(cache):
    assert cache.kv_cache_buffer.ptr == cache.get_combined_kv_cache(0).ptr


def test_a_padded_buffer_is_not_dense(cache):
    assert (cache.kv_cache_buffer.dtype, cache.kv_cache_buffer.is_contiguous) == ("float16", False)


def test_the_buffer_shows_the_layers(cache, stream):
    fill_all(cache, stream)
    buffer = cache.kv_cache_buffer.numpy().view(np.uint16)
    for layer in range(4):
        combined = cache.get_combined_kv_cache(layer).numpy().view(np.uint16)
        k, v = (view.numpy().view(np.uint16) for view in cache.get_separate_kv_cache(layer))
        if cache.config.layout is KVLayout.COMBINED:
            assert np.array_equal(buffer[layer], combined)
            assert np.array_equal(buffer[layer][:, 0], k)
            assert np.array_equal(buffer[layer][:, 1], v)
        else:
            assert np.array_equal(buffer[layer][0], k)
            assert np.array_equal(buffer[layer][1], v)
            assert np.array_equal(np.moveaxis(buffer[layer], 0, 1), combined)


@LAYOUTS
def test_a_buffer_without_padding_is_dense(memory, layout):
    fields = {**FIELDS, "max_sequence_length": 8}
    with LinearKVCache(CacheConfig(**fields, layout=layout), memory=memory) as cache:
        assert cache.kv_cache_buffer.is_contiguous
        assert cache.kv_cache_buffer.nbytes == cache.nbytes


@LAYOUTS
def test_the_same_bytes_as_a_manager_of_equal_layers(memory, stream, layout):
    linear = LinearKVCache(CacheConfig(**FIELDS, layout=layout), memory=memory)
    layers = [KVLayerConfig(num_kv_heads=2, head_dim=16)] * 4
    config = KVCacheConfig(layers=layers, max_batch_size=3, max_sequence_length=7, layout=layout)
    with linear, KVCacheManager(config, memory=memory) as manager:
        fill_all(linear, stream, value=0)
        for cache in (linear, manager):
            for layer in range(4):
                for which, view in enumerate(cache.get_separate_kv_cache(layer)):
                    for slot in range(3):
                        rows = np.random.default_rng([layer, which, slot]).standard_normal((1, 2, 7, 16)).astype(np.float16)
                        memory.upload(view[slot : slot + 1], rows, stream=stream)
                        memory.synchronize(stream)
        buffer = whole(linear.kv_cache_buffer).numpy().tobytes()
        assert buffer == b"".join(whole(manager.get_combined_kv_cache(layer)).numpy().tobytes() for layer in range(4))
        assert linear.nbytes == manager.nbytes


def test_the_names_of_seed_001(cache):
    combined = cache.get_combined_kv_cache_for_decoder_layer(2)
    assert (combined.ptr, combined.strides) == (cache.get_combined_kv_cache(2).ptr, cache.get_combined_kv_cache(2).strides)
    k, v = cache.get_separate_kv_cache_for_decoder_layer(2)
    assert [k.ptr, v.ptr] == [view.ptr for view in cache.get_separate_kv_cache(2)]
    for getter in (cache.get_combined_kv_cache_for_decoder_layer, cache.get_separate_kv_cache_for_decoder_layer):
        with pytest.raises(LayerIndexError):
            getter(4)


def test_the_buffer_after_close(cache):
    buffer = cache.kv_cache_buffer
    cache.close()
    with pytest.raises(ClosedError, match=r"^this LinearKVCache is closed\.$"):
        _ = cache.kv_cache_buffer
    with pytest.raises(ClosedError):
        _ = buffer.ptr


class TestStates:
    """Compaction, capture, restore and zeroing of states are in the tests of all kinds of caches."""

    def test_the_names_of_seed_001(self, memory, stream):
        with make_cache("linear", memory) as cache:
            fill_all(cache, stream)
            for index in range(2):
                assert cache.get_ssm_state_for_layer(index).shape == (5, 2, 3, 5)
                assert cache.get_ssm_state_for_layer(index).ptr == cache.get_recurrent_state(index).ptr
                assert cache.get_conv_state_for_layer(index).shape == (5, 7, 3)
                assert cache.get_conv_state_for_layer(index).ptr == cache.get_conv_state(index).ptr
            states = Image(cache).states
            for saved, expected in (
                (cache.capture_ssm_states(3, stream=stream), states[:2]),
                (cache.capture_conv_states(3, stream=stream), states[2:]),
            ):
                assert [tensor.numpy().tobytes() for tensor in saved] == [array[3].tobytes() for array in expected]
            cache.clear_mamba_states(stream=stream)
            assert not any(array.any() for array in Image(cache).states)

    def test_its_configuration(self, memory):
        config = linear_config(recurrent_dtype="bfloat16", conv_dtype="float32", ping_pong=True)
        with LinearKVCache(config, memory=memory) as cache, MambaCacheManager(config.mamba, memory=memory) as states:
            assert (cache.num_layers, cache.num_recurrent_layers) == (2, 2)
            assert cache.nbytes == config.nbytes == config.kv.nbytes + states.nbytes
            for index in range(2):
                mine = [cache.get_recurrent_state(index), cache.get_conv_state(index)]
                other = [states.get_recurrent_state(index), states.get_conv_state(index)]
                assert [(x.shape, x.dtype, x.strides) for x in mine] == [(x.shape, x.dtype, x.strides) for x in other]

    def test_without_a_recurrent_layer(self, cache, memory, stream):
        cache.reset_for_new_sequences([3, 5], stream=stream)
        assert (cache.num_recurrent_layers, cache.parity, cache.config.mamba) == (0, 0, None)
        with Unchanged(cache):
            cache.swap()
            cache.copy_back(0, 2, stream=stream)
            cache.clear_mamba_states(stream=stream)
            assert cache.capture_ssm_states(0, stream=stream) == cache.capture_conv_states(0, stream=stream) == []
            cache.restore_recurrent_states([], 0, stream=stream)
            for get in (cache.get_ssm_state_for_layer, cache.get_conv_state_for_layer):
                with raises(LayerIndexError, "recurrent_layer_idx 0", expected="0 <= recurrent_layer_idx < 0"):
                    get(0)
            with pytest.raises(ShapeError, match="there is no recurrent layer"):
                cache.restore_conv_states([cache.lengths.tensor], 0, stream=stream)
        cache.rewind(1, 2, stream=stream)
        assert cache.host_kv_cache_lengths == (3, 2)
