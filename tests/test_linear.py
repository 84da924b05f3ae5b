"""``LinearKVCache``: one buffer for all layers. What it shares with ``KVCacheManager`` is in test_manager.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trt_kvcache import CacheConfig, KVCacheConfig, KVCacheManager, KVLayerConfig, KVLayout, LinearKVCache
from trt_kvcache.errors import ClosedError, LayerIndexError

LAYOUTS = pytest.mark.parametrize("layout", list(KVLayout), ids=lambda layout: layout.value)
FIELDS: dict[str, Any] = {"num_attention_layers": 4, "max_batch_size": 3, "max_sequence_length": 7, "num_kv_heads": 2, "head_dim": 16}


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
    assert memory.live_nbytes == views[0].allocation.nbytes + cache.lengths.nbytes
    step = {KVLayout.COMBINED: 2816, KVLayout.SEPARATE: 3072}[cache.config.layout]
    assert [view.ptr - views[0].ptr for view in views] == [0, step, 2 * step, 3 * step]
    assert cache.nbytes == 4 * step
    assert views[0].ptr % 256 == 0


def test_the_buffer(cache):
    buffer = cache.kv_cache_buffer
    if cache.config.layout is KVLayout.COMBINED:
        assert buffer.shape == (4, 3, 2, 2, 7, 16)  # [L, B, 2, H, S, D]
        assert buffer.strides == (1408, 448, 224, 112, 16, 1)  # a layer of 1344 elements, padded
    else:
        assert buffer.shape == (4, 2, 3, 2, 7, 16)  # [L, 2, B, H, S, D]
        assert buffer.strides == (1536, 768, 224, 112, 16, 1)  # K of 672 elements, padded
    assert buffer.ptr == cache.get_combined_kv_cache(0).ptr
    assert (buffer.dtype, buffer.is_contiguous) == ("float16", False)


def test_the_buffer_shows_the_layers(cache, stream, fill):
    fill(cache, stream=stream)
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
def test_the_same_bytes_as_a_manager_of_equal_layers(memory, stream, raw_bytes, fill, layout):
    linear = LinearKVCache(CacheConfig(**FIELDS, layout=layout), memory=memory)
    layers = [KVLayerConfig(num_kv_heads=2, head_dim=16)] * 4
    config = KVCacheConfig(layers=layers, max_batch_size=3, max_sequence_length=7, layout=layout)
    with linear, KVCacheManager(config, memory=memory) as manager:
        fill(linear, stream=stream, value=0)
        for cache in (linear, manager):
            for layer in range(4):
                for which, view in enumerate(cache.get_separate_kv_cache(layer)):
                    for slot in range(3):
                        rows = np.random.default_rng([layer, which, slot]).standard_normal((1, 2, 7, 16)).astype(np.float16)
                        memory.upload(view[slot : slot + 1], rows, stream=stream)
                        memory.synchronize(stream)
        whole = raw_bytes(linear.kv_cache_buffer).numpy().tobytes()
        assert whole == b"".join(raw_bytes(manager.get_combined_kv_cache(layer)).numpy().tobytes() for layer in range(4))
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
