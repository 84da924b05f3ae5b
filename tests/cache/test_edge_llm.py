"""``make_cache``: the manager of a configuration; and the one configuration that all classes satisfy."""

import pytest

from tests.helpers.assertions import raises
from tests.helpers.caches import hybrid_config, kv_config, linear_config, mamba_config
from trt_kvcache import CacheConfig, HybridCacheManager, KVCacheManager, LayerType, LinearKVCache, MambaCacheManager
from trt_kvcache.cache.edge_llm import make_cache
from trt_kvcache.errors import LayerIndexError

ATTENTION, MAMBA = LayerType.ATTENTION, LayerType.MAMBA


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (kv_config(), KVCacheManager),
        (linear_config(), LinearKVCache),
        (mamba_config(), MambaCacheManager),
        (hybrid_config(), HybridCacheManager),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_manager_of_a_configuration(memory, config, expected):
    with make_cache(config, memory=memory) as cache:
        assert (type(cache), cache.config, cache.nbytes) == (expected, config, config.nbytes)
        assert (cache.kv_config, cache.mamba_config, cache.layer_types) == (config.kv, config.mamba, config.layer_types)


def test_layer_types():
    assert kv_config().layer_types == (ATTENTION,) * 3
    assert mamba_config().layer_types == (MAMBA,) * 2
    assert linear_config().layer_types == (ATTENTION, ATTENTION, MAMBA, MAMBA)


def test_a_flat_configuration_is_read_back():
    config = linear_config(k_scale=0.5, dtype="int8")
    assert CacheConfig.from_dict(config.to_dict()) == config


def test_a_manager_of_one_type_has_no_layer_of_the_other(memory):
    with (
        make_cache(kv_config(), memory=memory) as cache,
        raises(LayerIndexError, "recurrent_layer_idx 0", expected="0 <= recurrent_layer_idx < 0"),
    ):
        cache.get_conv_state(0)
    with (
        make_cache(mamba_config(), memory=memory) as cache,
        raises(LayerIndexError, "attn_layer_idx 0", expected="0 <= attn_layer_idx < 0"),
    ):
        cache.get_combined_kv_cache(0)
