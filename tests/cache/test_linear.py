"""``LinearKVCache``: one buffer for all layers, and states. What it shares with other managers is in their files."""

import pytest

from tests.helpers.cache_cases import Image, fill_all, make_cache
from trt_kvcache import KVLayerConfig, KVLayout


@pytest.fixture(params=list(KVLayout))
def cache(request, memory):
    sizes = {"num_attention_layers": 4, "num_mamba_layers": 0, "max_batch_size": 3}
    with make_cache("linear", memory, **sizes, layout=request.param) as cache:
        yield cache


def test_one_allocation_holds_all_layers(cache, memory):
    combined = cache.config.layout is KVLayout.COMBINED
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


def test_the_names_of_seed_001(cache, memory, stream):
    assert cache.get_combined_kv_cache_for_decoder_layer(2).ptr == cache.get_combined_kv_cache(2).ptr
    assert [view.ptr for view in cache.get_separate_kv_cache_for_decoder_layer(2)] == [v.ptr for v in cache.get_separate_kv_cache(2)]
    with make_cache("linear", memory) as other:
        fill_all(other, stream)
        for index in range(2):
            assert other.get_ssm_state_for_layer(index).ptr == other.get_recurrent_state(index).ptr
            assert other.get_conv_state_for_layer(index).ptr == other.get_conv_state(index).ptr
        saved = other.capture_ssm_states(3, stream=stream)
        assert [tensor.numpy().tobytes() for tensor in saved] == [array[3].tobytes() for array in Image(other).states[:2]]
