"""The layers by head dim, as kernels take them."""

import numpy as np
import pytest

from tests.helpers.caches import HEADS, LAYER_TYPES, Image, cache_holding, hybrid_config, kv_config, make_cache
from trt_kvcache import HybridCacheManager, KVCacheManager, KVLayout
from trt_kvcache.errors import ClosedError
from trt_kvcache.kernels import KVLayerInfos, save_kv_cache_batched

#: The attention layers of a hybrid, by their index among all layers.
ATTENTION_LAYERS = [index for index, kind in enumerate(LAYER_TYPES) if kind.value == "attention"]


@pytest.mark.parametrize("kind", ["manager", "hybrid"])
def test_there_is_one_for_each_head_dim(memory, kind):
    with make_cache(kind, memory) as cache:
        groups = cache.kv_head_dim_groups
        assert [(group.head_dim, group.attn_layer_indices) for group in groups] == [(16, (0, 2)), (48, (1,))]


@pytest.mark.parametrize("kind", ["manager", "hybrid"])
def test_it_says_how_many_layers_and_heads_there_are(memory, kind):
    with make_cache(kind, memory) as cache:
        assert [(group.num_layers, group.max_kv_heads) for group in cache.kv_head_dim_groups] == [(2, 3), (1, 1)]


def test_a_uniform_cache_has_one(memory):
    with KVCacheManager(kv_config([(2, 16)] * 3), memory=memory) as cache:
        (group,) = cache.kv_head_dim_groups
        assert (group.head_dim, group.max_kv_heads, group.attn_layer_indices) == (16, 2, (0, 1, 2))


def test_a_linear_cache_has_one(memory):
    with make_cache("linear", memory) as cache:
        (group,) = cache.kv_head_dim_groups
        assert (group.head_dim, group.max_kv_heads, group.attn_layer_indices) == (16, 2, (0, 1))


def test_states_alone_have_none(memory):
    with make_cache("states", memory) as cache:
        assert cache.kv_head_dim_groups == ()


def test_infos_are_those_of_the_layers(memory):
    with make_cache("hybrid", memory) as cache:
        for group in cache.kv_head_dim_groups:
            layers = [cache.get_combined_kv_cache(ATTENTION_LAYERS[index]) for index in group.attn_layer_indices]
            assert [info.data for info in group.layer_infos.host] == [layer.ptr for layer in layers]
            assert [info.num_kv_heads for info in group.layer_infos.host] == [layer.shape[2] for layer in layers]


def test_infos_are_on_the_device_too(memory):
    with make_cache("hybrid", memory) as cache:
        for group in cache.kv_head_dim_groups:
            array = group.device_layer_infos
            assert (array.memory, array.shape, array.dtype) == (memory, (group.num_layers, 5), "int64")
            assert array.numpy()[:, 0].tolist() == [info.data for info in group.layer_infos.host]


def test_a_hybrid_has_those_of_its_manager(memory):
    with HybridCacheManager(hybrid_config(), memory=memory) as cache:
        inner = cache.kv_cache_manager.kv_head_dim_groups
        assert [group.device_layer_infos.ptr for group in cache.kv_head_dim_groups] == [group.device_layer_infos.ptr for group in inner]


def test_the_array_closes_with_the_cache(memory):
    cache = make_cache("manager", memory)
    group = cache.kv_head_dim_groups[0]
    cache.close()
    with pytest.raises(ClosedError):
        _ = group.device_layer_infos


def test_a_kernel_takes_one(memory, stream):
    with cache_holding("hybrid", memory, stream, layout=KVLayout.COMBINED) as cache:
        group = cache.kv_head_dim_groups[0]
        heads = [HEADS[index][0] for index in group.attn_layer_indices]
        saved = [memory.to_device(np.zeros((2, h, 3, 16), np.float16), stream=stream) for h in heads]
        save_kv_cache_batched(group.layer_infos, KVLayerInfos(saved, stream=stream), 4, 3, stream=stream)
        rows = Image(cache).rows
        for tensor, index in zip(saved, group.attn_layer_indices, strict=True):
            assert np.array_equal(tensor.numpy().view(np.uint8), rows[index][4, :, :, :3])
