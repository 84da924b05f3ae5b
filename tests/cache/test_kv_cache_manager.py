"""``KVCacheManager``: one allocation per layer, and layers that differ."""

import numpy as np
import pytest

from trt_kvcache import (
    KVCacheConfig,
    KVCacheManager,
    KVLayerConfig,
    KVLayout,
    estimate_memory,
)
from trt_kvcache.errors import (
    ShapeError,
)

LAYOUTS = pytest.mark.parametrize("layout", list(KVLayout), ids=lambda layout: layout.value)
# B=3, S=7; layers of (H, D)
HEADS = [(2, 16), (1, 32), (4, 48)]
B, S = 3, 7


def kv_config(heads=HEADS, **changes):
    layers = [KVLayerConfig(num_kv_heads=h, head_dim=d) for h, d in heads]
    return KVCacheConfig(**{"layers": layers, "max_batch_size": B, "max_sequence_length": S, **changes})


def test_how_it_looks(memory):
    stream = memory.create_stream()
    kv = KVCacheConfig(
        layers=[KVLayerConfig(num_kv_heads=2, head_dim=64), KVLayerConfig(num_kv_heads=1, head_dim=128)],
        max_batch_size=4,
        max_sequence_length=256,
        dtype="float16",
        layout=KVLayout.COMBINED,
    )
    cache = KVCacheManager(kv, memory=memory)
    cache.reset_for_new_sequences([0, 5, 0], stream=stream)
    assert cache.get_combined_kv_cache(1).shape == (4, 2, 1, 256, 128)
    cache.set_active_batch_size(2, stream=stream)
    cache.commit_sequence_length(7, stream=stream)
    assert cache.kv_cache_lengths.numpy().tolist() == [7, 12]
    assert cache.host_kv_cache_lengths == (7, 12)
    lengths = memory.to_device(np.array([3, 1], np.int32), stream=stream)
    cache.commit_sequence_length(lengths, max_increment=3, stream=stream)
    cache.sync_lengths(stream=stream)
    assert cache.host_kv_cache_lengths == (10, 13)
    cache.set_active_batch_size(1, stream=stream)
    cache.clear_slot(0, stream=stream)
    assert cache.kv_cache_all_empty
    assert estimate_memory(kv).nbytes == kv.nbytes == cache.nbytes == 2 * 4 * 2 * 256 * 128 * 2
    cache.close()


def test_what_it_says_about_itself(memory):
    kv = kv_config(dtype="int8", heads=[(2, 16), (1, 32)])
    with KVCacheManager(kv, memory=memory) as cache:
        assert cache.config is cache.kv_config is kv
        assert (cache.num_layers, cache.is_uniform, cache.memory, cache.closed) == (2, False, memory, False)
        assert cache.get_layer_config(1) == KVLayerConfig(num_kv_heads=1, head_dim=32)
        assert cache.active_batch_size == 0
        assert cache.kv_cache_lengths.shape == (0,)
        assert cache.kv_cache_all_empty
    assert cache.closed
    with KVCacheManager(kv_config(heads=[(2, 16)] * 2), memory=memory) as cache:
        assert cache.is_uniform


@LAYOUTS
def test_views_of_layers_that_differ(memory, layout):
    with KVCacheManager(kv_config(dtype="float32", layout=layout), memory=memory) as cache:
        for index, (h, d) in enumerate(HEADS):
            combined, (k, v) = cache.get_combined_kv_cache(index), cache.get_separate_kv_cache(index)
            assert combined.shape == (B, 2, h, S, d)
            assert k.shape == v.shape == (B, h, S, d)
            assert combined.dtype == k.dtype == v.dtype == "float32"
            assert combined.ptr == k.ptr
            assert k.ptr % 256 == 0
            assert combined.is_contiguous is (layout is KVLayout.COMBINED)
            assert k.is_contiguous is v.is_contiguous is (layout is KVLayout.SEPARATE)
            slot = h * S * d
            if layout is KVLayout.COMBINED:
                assert combined.strides == (2 * slot, slot, S * d, d, 1)
                assert k.strides == v.strides == (2 * slot, S * d, d, 1)
                assert v.ptr - k.ptr == slot * 4
            else:
                padded = -(-B * slot * 4 // 256) * 256
                assert combined.strides == (slot, padded // 4, S * d, d, 1)
                assert k.strides == v.strides == (slot, S * d, d, 1)
                assert v.ptr - k.ptr == padded
                assert v.ptr % 256 == 0


@LAYOUTS
def test_a_view_that_starts_at_a_slot(memory, layout):
    with KVCacheManager(kv_config(layout=layout), memory=memory) as cache:
        combined, (k, v) = cache.get_combined_kv_cache(0), cache.get_separate_kv_cache(0)
        slot_bytes = 2 * S * 16 * 2
        step = 2 * slot_bytes if layout is KVLayout.COMBINED else slot_bytes
        assert combined[1:3].ptr - combined.ptr == k[1:3].ptr - k.ptr == v[1:3].ptr - v.ptr == step
        assert k[1:3].shape == (2, 2, S, 16)
        assert k[2:3].is_contiguous
        assert v[2:3].is_contiguous
        assert k[3:3].shape == (0, 2, S, 16)
        for start, stop in ((-1, 2), (0, 4), (2, 1)):
            with pytest.raises(ShapeError, match="Slices never wrap"):
                k[start:stop]


def test_for_one_slot_both_layouts_are_dense_both_ways(memory):
    for layout in KVLayout:
        with KVCacheManager(kv_config([(2, 64)], max_batch_size=1, max_sequence_length=8, layout=layout), memory=memory) as cache:
            assert cache.get_combined_kv_cache(0).is_contiguous
            assert all(view.is_contiguous for view in cache.get_separate_kv_cache(0))
