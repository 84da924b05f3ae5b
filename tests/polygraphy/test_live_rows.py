from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trt_kvcache import (
    CacheConfig,
    HybridCacheConfig,
    HybridCacheManager,
    KVCacheConfig,
    KVCacheManager,
    KVLayerConfig,
    KVLayout,
    LayerType,
    LinearKVCache,
    MambaCacheConfig,
)
from trt_kvcache.errors import ClosedError, LengthsUnknown
from trt_kvcache.polygraphy.live_rows import live_rows

B, S = 3, 7


def _manager(memory: Any, layout: KVLayout, dtype: str = "float16") -> KVCacheManager:
    layers = [KVLayerConfig(num_kv_heads=2, head_dim=16), KVLayerConfig(num_kv_heads=1, head_dim=24)]
    return KVCacheManager(KVCacheConfig(layers=layers, max_batch_size=B, max_sequence_length=S, dtype=dtype, layout=layout), memory=memory)


def _written(cache: Any, stream: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Fill every K and V with numbers of their own and return them, ``[B, H, S, D]`` by name."""
    written = {}
    for layer in range(cache.num_layers):
        combined = cache.get_combined_kv_cache(layer)
        dense = cache.get_separate_kv_cache(layer)[0].is_contiguous
        shape = combined.shape
        values = np.random.default_rng(layer).integers(-99, 99, shape).astype(combined.numpy().dtype)
        if dense:
            for which, view in enumerate(cache.get_separate_kv_cache(layer)):
                cache.memory.upload(view, np.ascontiguousarray(values[:, which]), stream=stream)
        else:
            cache.memory.upload(combined, values, stream=stream)
        written[f"k_cache_{layer}"], written[f"v_cache_{layer}"] = values[:, 0], values[:, 1]
    cache.memory.synchronize(stream)
    return written


@pytest.mark.parametrize("layout", KVLayout)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_live_rows_are_what_the_cache_holds_up_to_each_length(memory: Any, stream: Any, layout: KVLayout, dtype: str) -> None:
    with _manager(memory, layout, dtype) as cache:
        written = _written(cache, stream)
        cache.reset_for_new_sequences([5, 0, 2], stream=stream)
        rows = live_rows(cache)
        assert list(rows) == ["k_cache_0", "v_cache_0", "k_cache_1", "v_cache_1", "kvcache_lengths"]
        assert rows["kvcache_lengths"].dtype == np.int32
        assert rows["kvcache_lengths"].tolist() == [5, 0, 2]
        for name, values in written.items():
            expected = values[:, :, :5].astype(np.float32)
            expected[1] = 0
            expected[2, :, 2:] = 0
            assert rows[name].dtype == np.float32
            np.testing.assert_array_equal(rows[name], expected, err_msg=name)


def test_dead_rows_are_zero(memory: Any, stream: Any) -> None:
    with _manager(memory, KVLayout.SEPARATE) as cache:
        for layer in range(cache.num_layers):
            for view in cache.get_separate_kv_cache(layer):
                memory.upload(view, np.full(view.shape, np.nan, np.float16), stream=stream)
        memory.synchronize(stream)
        cache.reset_for_new_sequences([0, 3], stream=stream)
        rows = live_rows(cache)
        assert rows["k_cache_0"].shape == (2, 2, 3, 16)
        assert (rows["v_cache_1"][0] == 0).all()
        assert np.isnan(rows["v_cache_1"][1]).all()


def test_all_layers_in_one_buffer(memory: Any, stream: Any) -> None:
    config = CacheConfig(
        num_attention_layers=2,
        max_batch_size=B,
        max_sequence_length=S,
        num_kv_heads=2,
        head_dim=16,
        dtype="float16",
        layout=KVLayout.SEPARATE,
        num_mamba_layers=0,
    )
    with LinearKVCache(config, memory=memory) as cache:
        written = _written(cache, stream)
        cache.reset_for_new_sequences([7, 7, 7], stream=stream)
        rows = live_rows(cache)
        for name, values in written.items():
            np.testing.assert_array_equal(rows[name], values, err_msg=name)


STATES = MambaCacheConfig(
    num_layers=2, max_batch_size=B, num_heads=2, head_dim=3, state_size=4, conv_dim=5, conv_kernel=2, ping_pong=True, conv_dtype="float16"
)


def test_states_come_in_the_order_of_the_layers_and_are_the_current_ones(memory: Any, stream: Any) -> None:
    kv = KVCacheConfig(layers=[KVLayerConfig(num_kv_heads=1, head_dim=8)], max_batch_size=B, max_sequence_length=S)
    types = [LayerType.MAMBA, LayerType.ATTENTION, LayerType.MAMBA]
    with HybridCacheManager(HybridCacheConfig(layer_types=types, kv=kv, mamba=STATES), memory=memory) as cache:
        cache.reset_for_new_sequences([3, 0], stream=stream)
        cache.swap()
        expected = {}
        for layer, place in enumerate((0, 2)):
            for name, view in (("conv", cache.get_conv_state(place)), ("recurrent", cache.get_recurrent_state(place))):
                values = np.random.default_rng(layer).integers(-99, 99, view.shape).astype(view.numpy().dtype)
                memory.upload(view, values, stream=stream)
                expected[f"{name}_state_{layer}"] = values[:2].astype(np.float32)
        memory.synchronize(stream)
        rows = live_rows(cache)
        of_layers = ["conv_state_0", "recurrent_state_0", "k_cache_0", "v_cache_0", "conv_state_1", "recurrent_state_1"]
        assert list(rows) == [*of_layers, "kvcache_lengths"]
        for name, values in expected.items():
            values[1] = 0  # the slot holds no token, whatever is in its states
            assert rows[name].dtype == np.float32
            np.testing.assert_array_equal(rows[name], values, err_msg=name)


def test_states_of_a_cache_that_does_not_know_the_order_come_last(memory: Any, stream: Any) -> None:
    config = CacheConfig(
        num_attention_layers=1,
        max_batch_size=B,
        max_sequence_length=S,
        num_kv_heads=2,
        head_dim=16,
        num_mamba_layers=1,
        mamba_num_heads=2,
        mamba_head_dim=3,
        ssm_state_size=4,
        conv_dim=5,
        conv_kernel=2,
    )
    with LinearKVCache(config, memory=memory) as cache:
        cache.reset_for_new_sequences([2], stream=stream)
        assert list(live_rows(cache)) == ["k_cache_0", "v_cache_0", "conv_state_0", "recurrent_state_0", "kvcache_lengths"]


def test_live_rows_are_a_copy(memory: Any, stream: Any) -> None:
    with _manager(memory, KVLayout.SEPARATE) as cache:
        written = _written(cache, stream)
        cache.reset_for_new_sequences([7, 7, 7], stream=stream)
        live_rows(cache)["k_cache_0"][...] = 0
        np.testing.assert_array_equal(live_rows(cache)["k_cache_0"], written["k_cache_0"])


def test_without_active_slots_there_are_no_rows(memory: Any) -> None:
    with _manager(memory, KVLayout.SEPARATE) as cache:
        assert live_rows(cache)["k_cache_1"].shape == (0, 1, 0, 24)


def test_lengths_must_be_known_and_the_cache_open(memory: Any, stream: Any) -> None:
    cache = _manager(memory, KVLayout.SEPARATE)
    cache.reset_for_new_sequences([1], stream=stream)
    increments = memory.to_device(np.array([1], np.int32), stream=stream)
    cache.commit_sequence_length(increments, max_increment=1, stream=stream)
    with pytest.raises(LengthsUnknown):
        live_rows(cache)
    cache.sync_lengths(stream=stream)
    assert live_rows(cache)["kvcache_lengths"].tolist() == [2]
    cache.close()
    with pytest.raises(ClosedError):
        live_rows(cache)
