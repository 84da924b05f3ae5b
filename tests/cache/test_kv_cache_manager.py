"""``KVCacheManager``: one allocation per layer, and layers that differ."""

import numpy as np
import pytest

from tests.cache.scene import HEADS, B, S, kv_config
from tests.helpers.caches import LAYOUTS
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


def test_the_numbers_of_the_contract(memory):
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


class TestProperties:
    @pytest.fixture
    def cache(self, memory):
        with KVCacheManager(kv_config(dtype="int8", heads=[(2, 16), (1, 32)]), memory=memory) as cache:
            yield cache

    def test_the_configuration_is_the_one_that_was_given(self, cache):
        assert cache.config is cache.kv_config
        assert cache.config == kv_config(dtype="int8", heads=[(2, 16), (1, 32)])

    def test_layers(self, cache):
        assert (cache.num_layers, cache.get_layer_config(1)) == (2, KVLayerConfig(num_kv_heads=1, head_dim=32))

    def test_the_memory(self, cache, memory):
        assert cache.memory is memory

    def test_there_are_no_recurrent_layers(self, cache):
        assert (cache.mamba_config, cache.states) == (None, None)

    def test_no_slot_is_active_at_the_start(self, cache):
        assert (cache.active_batch_size, cache.kv_cache_lengths.shape, cache.kv_cache_all_empty) == (0, (0,), True)

    @pytest.mark.parametrize(("heads", "uniform"), [([(2, 16)] * 2, True), ([(2, 16), (1, 16)], False), ([(2, 16), (2, 32)], False)])
    def test_is_uniform(self, memory, heads, uniform):
        with KVCacheManager(kv_config(heads=heads), memory=memory) as cache:
            assert cache.is_uniform is uniform


@pytest.mark.parametrize(("layer", "heads", "head_dim"), [(index, *heads) for index, heads in enumerate(HEADS)])
class TestViews:
    """Of layers that differ, in float32."""

    @pytest.fixture(params=list(KVLayout), ids=lambda layout: layout.value)
    def cache(self, request, memory):
        with KVCacheManager(kv_config(dtype="float32", layout=request.param), memory=memory) as cache:
            yield cache

    def test_shapes(self, cache, layer, heads, head_dim):
        assert cache.get_combined_kv_cache(layer).shape == (B, 2, heads, S, head_dim)
        assert [view.shape for view in cache.get_separate_kv_cache(layer)] == [(B, heads, S, head_dim)] * 2

    def test_dtype(self, cache, layer, heads, head_dim):
        assert {view.dtype for view in (cache.get_combined_kv_cache(layer), *cache.get_separate_kv_cache(layer))} == {"float32"}

    def test_strides(self, cache, layer, heads, head_dim):
        slot = heads * S * head_dim
        if cache.config.layout is KVLayout.COMBINED:
            slot_stride, kv_stride = 2 * slot, slot
        else:
            slot_stride, kv_stride = slot, -(-B * slot * 4 // 256) * 256 // 4  # K is padded to a multiple of 256 bytes
        inner = (S * head_dim, head_dim, 1)
        assert cache.get_combined_kv_cache(layer).strides == (slot_stride, kv_stride, *inner)
        assert [view.strides for view in cache.get_separate_kv_cache(layer)] == [(slot_stride, *inner)] * 2

    def test_k_comes_first_and_v_is_behind_it(self, cache, layer, heads, head_dim):
        combined, (k, v) = cache.get_combined_kv_cache(layer), cache.get_separate_kv_cache(layer)
        assert (k.ptr - combined.ptr, v.ptr - combined.ptr) == (0, combined.strides[1] * 4)

    def test_what_the_layout_is_named_after_is_dense(self, cache, layer, heads, head_dim):
        combined = cache.config.layout is KVLayout.COMBINED
        assert cache.get_combined_kv_cache(layer).is_contiguous is combined
        assert [view.is_contiguous for view in cache.get_separate_kv_cache(layer)] == [not combined] * 2

    def test_what_is_dense_starts_at_256_bytes(self, cache, layer, heads, head_dim):
        views = [cache.get_combined_kv_cache(layer), *cache.get_separate_kv_cache(layer)]
        assert {view.ptr % 256 for view in views if view.is_contiguous} == {0}


class TestViewsOfSomeSlots:
    @pytest.fixture(params=list(KVLayout), ids=lambda layout: layout.value)
    def cache(self, request, memory):
        with KVCacheManager(kv_config(layout=request.param), memory=memory) as cache:
            yield cache

    def test_start_at_their_slot(self, cache):
        slot_nbytes = 2 * S * 16 * 2
        step = 2 * slot_nbytes if cache.config.layout is KVLayout.COMBINED else slot_nbytes
        for view in (cache.get_combined_kv_cache(0), *cache.get_separate_kv_cache(0)):
            assert view[1:3].ptr - view.ptr == step

    def test_have_as_many_slots(self, cache):
        k, _ = cache.get_separate_kv_cache(0)
        assert (k[1:3].shape, k[3:3].shape) == ((2, 2, S, 16), (0, 2, S, 16))

    def test_of_one_slot_are_dense_whatever_the_layout(self, cache):
        assert all(view[2:3].is_contiguous for view in cache.get_separate_kv_cache(0))

    @pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 4), (2, 1)])
    def test_never_wrap(self, cache, start, stop):
        k, _ = cache.get_separate_kv_cache(0)
        with pytest.raises(ShapeError, match="Slices never wrap"):
            k[start:stop]


@LAYOUTS
def test_for_one_slot_both_layouts_are_dense_both_ways(memory, layout):
    with KVCacheManager(kv_config([(2, 64)], max_batch_size=1, max_sequence_length=8, layout=layout), memory=memory) as cache:
        assert cache.get_combined_kv_cache(0).is_contiguous
        assert all(view.is_contiguous for view in cache.get_separate_kv_cache(0))
