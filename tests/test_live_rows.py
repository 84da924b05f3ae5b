from __future__ import annotations

import numpy as np
import pytest

from trt_kvcache import KVCacheConfig, KVCacheManager, KVLayerConfig, KVLayout
from trt_kvcache.errors import ClosedError, LengthsUnknown
from trt_kvcache.live_rows import live_rows

B, S = 3, 7


def _manager(memory, layout, dtype="float16"):
    layers = [KVLayerConfig(num_kv_heads=2, head_dim=16), KVLayerConfig(num_kv_heads=1, head_dim=24)]
    return KVCacheManager(KVCacheConfig(layers=layers, max_batch_size=B, max_sequence_length=S, dtype=dtype, layout=layout), memory=memory)


def _written(cache, stream, lengths):
    """Fill every K and V with numbers of their own, set lengths, and return the numbers, ``[B, H, S, D]`` by name."""
    written = {}
    for layer in range(cache.num_layers):
        combined, separate = cache.get_combined_kv_cache(layer), cache.get_separate_kv_cache(layer)
        values = np.random.default_rng(layer).integers(-99, 99, combined.shape).astype(combined.numpy().dtype)
        written[f"k_cache_{layer}"], written[f"v_cache_{layer}"] = values[:, 0], values[:, 1]
        for view, part in zip(separate, (values[:, 0], values[:, 1]), strict=True):
            if view.is_contiguous:
                cache.memory.upload(view, np.ascontiguousarray(part), stream=stream)
        if not separate[0].is_contiguous:
            cache.memory.upload(combined, values, stream=stream)
    cache.reset_for_new_sequences(lengths, stream=stream)
    cache.memory.synchronize(stream)
    return written


@pytest.mark.parametrize("layout", KVLayout)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_they_are_what_the_cache_holds_up_to_each_length(memory, stream, layout, dtype):
    with _manager(memory, layout, dtype) as cache:
        written = _written(cache, stream, [5, 0, 2])
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


def test_lengths_must_be_known_and_the_cache_open(memory, stream):
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
