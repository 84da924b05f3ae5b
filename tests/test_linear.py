"""``LinearKVCache``: one buffer for all layers, and states. What it shares with other managers is in their files."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cache_cases import Image, fill_all, make_cache

from trt_kvcache import CacheConfig, KVCacheConfig, KVCacheManager, KVLayerConfig, KVLayout, LinearKVCache
from trt_kvcache.errors import ClosedError

FIELDS: dict[str, Any] = {"num_attention_layers": 4, "max_batch_size": 3, "max_sequence_length": 7, "num_kv_heads": 2, "head_dim": 16}


@pytest.fixture(params=list(KVLayout), ids=lambda layout: layout.value)
def cache(request, memory):
    with LinearKVCache(CacheConfig(**FIELDS, layout=request.param), memory=memory) as cache:
        yield cache


def test_one_allocation_holds_all_layers(cache, memory):
    combined = cache.config.layout is KVLayout.COMBINED
    assert cache.config == CacheConfig(**FIELDS, layout=cache.config.layout)
    assert (cache.kv_config, cache.num_layers, cache.is_uniform, cache.memory) == (cache.config.kv, 4, True, memory)
    assert cache.get_layer_config(3) == KVLayerConfig(num_kv_heads=2, head_dim=16)
    views = [cache.get_combined_kv_cache(index) for index in range(4)]
    assert len({id(view.allocation) for view in views}) == 1
    (group,) = cache.kv_head_dim_groups
    assert memory.live_nbytes == views[0].allocation.nbytes + cache.lengths.nbytes + group.device_layer_infos.nbytes
    step = 2816 if combined else 3072
    assert [view.ptr - views[0].ptr for view in views] == [0, step, 2 * step, 3 * step]
    assert (cache.nbytes, views[0].ptr % 256) == (4 * step, 0)
    buffer = cache.kv_cache_buffer
    if combined:
        assert buffer.shape == (4, 3, 2, 2, 7, 16)  # [L, B, 2, H, S, D]
        assert buffer.strides == (1408, 448, 224, 112, 16, 1)  # a layer of 1344 elements, padded
    else:
        assert buffer.shape == (4, 2, 3, 2, 7, 16)  # [L, 2, B, H, S, D]
        assert buffer.strides == (1536, 768, 224, 112, 16, 1)  # K of 672 elements, padded
    assert (buffer.ptr, buffer.dtype, buffer.is_contiguous) == (views[0].ptr, "float16", False)
    cache.close()
    with pytest.raises(ClosedError):
        _ = buffer.ptr


def test_the_buffer_shows_the_layers(cache, stream, fill):
    fill(cache, stream=stream)
    buffer = cache.kv_cache_buffer.numpy().view(np.uint16)
    for layer in range(4):
        combined = cache.get_combined_kv_cache(layer).numpy().view(np.uint16)
        both = buffer[layer] if cache.config.layout is KVLayout.SEPARATE else np.moveaxis(buffer[layer], 1, 0)
        assert np.array_equal(np.moveaxis(both, 0, 1), combined)
        for view, array in zip(cache.get_separate_kv_cache(layer), both, strict=True):
            assert np.array_equal(view.numpy().view(np.uint16), array)


def test_a_buffer_without_padding_is_dense(cache, memory):
    config = CacheConfig(**{**FIELDS, "max_sequence_length": 8}, layout=cache.config.layout)
    with LinearKVCache(config, memory=memory) as dense:
        assert (dense.kv_cache_buffer.is_contiguous, dense.kv_cache_buffer.nbytes) == (True, dense.nbytes)


def test_the_same_bytes_as_a_manager_of_equal_layers(cache, memory, stream, raw_bytes, fill):
    layers = [KVLayerConfig(num_kv_heads=2, head_dim=16)] * 4
    config = KVCacheConfig(layers=layers, max_batch_size=3, max_sequence_length=7, layout=cache.config.layout)
    with KVCacheManager(config, memory=memory) as manager:
        fill(cache, stream=stream, value=0)
        for layer in range(4):
            for slot in range(3):
                values = np.random.default_rng(3 * layer + slot).integers(0, 2**15, (2, 1, 2, 7, 16), np.uint16).view(np.float16)
                for one in (cache, manager):
                    for view, rows in zip(one.get_separate_kv_cache(layer), values, strict=True):
                        memory.upload(view[slot : slot + 1], rows, stream=stream)
        memory.synchronize(stream)
        whole = raw_bytes(cache.kv_cache_buffer).numpy().tobytes()
        assert whole == b"".join(raw_bytes(manager.get_combined_kv_cache(layer)).numpy().tobytes() for layer in range(4))
        assert cache.nbytes == manager.nbytes


def test_the_names_of_seed_001(cache, memory, stream):
    combined = cache.get_combined_kv_cache_for_decoder_layer(2)
    assert (combined.ptr, combined.strides) == (cache.get_combined_kv_cache(2).ptr, cache.get_combined_kv_cache(2).strides)
    k, v = cache.get_separate_kv_cache_for_decoder_layer(2)
    assert [k.ptr, v.ptr] == [view.ptr for view in cache.get_separate_kv_cache(2)]
    with make_cache("linear", memory) as other:
        fill_all(other, stream)
        for index in range(2):
            assert other.get_ssm_state_for_layer(index).ptr == other.get_recurrent_state(index).ptr
            assert other.get_conv_state_for_layer(index).ptr == other.get_conv_state(index).ptr
        saved = other.capture_ssm_states(3, stream=stream)
        assert [tensor.numpy().tobytes() for tensor in saved] == [array[3].tobytes() for array in Image(other).states[:2]]
