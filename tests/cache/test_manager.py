"""``KVCacheManager``, and what it shares with ``LinearKVCache``: bytes, views, life. What they refuse is in test_bad_inputs.py."""

import gc
import weakref

import numpy as np
import pytest

from tests.helpers.cache_cases import LAYOUTS, fill_all, kv_config, linear_config, make_cache, rows_of, whole
from trt_kvcache import HostMemory, KVCacheManager, KVLayerConfig, KVLayout, LinearKVCache
from trt_kvcache.errors import ClosedError

KINDS = pytest.mark.parametrize("kind", ["manager", "linear"])


def as_bytes(view):
    """The elements of a view as bytes [..., itemsize]: NaN compares equal to itself."""
    array = np.ascontiguousarray(view if isinstance(view, np.ndarray) else view.numpy())
    return array.view(np.uint8).reshape(*array.shape, array.dtype.itemsize)


def test_what_it_says_about_itself(memory):
    kv = kv_config([(2, 16), (1, 32)], dtype="int8")
    with KVCacheManager(kv, memory=memory) as cache:
        assert (cache.config, cache.num_layers, cache.is_uniform, cache.memory) == (kv, 2, False, memory)
        assert cache.get_layer_config(1) == kv.layers[1]
        assert (cache.active_batch_size, cache.kv_cache_lengths.shape, cache.kv_cache_all_empty) == (0, (0,), True)
    assert KVCacheManager(kv_config([(2, 16)] * 2), memory=memory).is_uniform


# Where a row lies. B=2, H=3, S=5, D=8 in float16: a row is 16 bytes, a head of a slot 80. K and V of a slot are 240 bytes each.
COMBINED_TABLE = """
    0 slot 0 K head 0      240 slot 0 V head 0      480 slot 1 K head 0      720 slot 1 V head 0
   80 slot 0 K head 1      320 slot 0 V head 1      560 slot 1 K head 1      800 slot 1 V head 1
  160 slot 0 K head 2      400 slot 0 V head 2      640 slot 1 K head 2      880 slot 1 V head 2
"""  # 960 bytes, padded to 1024
SEPARATE_TABLE = """
    0 slot 0 K head 0      240 slot 1 K head 0      512 slot 0 V head 0      752 slot 1 V head 0
   80 slot 0 K head 1      320 slot 1 K head 1      592 slot 0 V head 1      832 slot 1 V head 1
  160 slot 0 K head 2      400 slot 1 K head 2      672 slot 0 V head 2      912 slot 1 V head 2
"""  # K ends at 480 and V starts at 512; V ends at 992, padded to 1024
TABLES = {KVLayout.COMBINED: COMBINED_TABLE, KVLayout.SEPARATE: SEPARATE_TABLE}


@KINDS
@LAYOUTS
def test_rows_lie_where_the_table_says(memory, stream, kind, layout):
    """Read through views, and written through views."""
    sizes = {"max_batch_size": 2, "max_sequence_length": 5, "layout": layout}
    if kind == "manager":
        cache = KVCacheManager(kv_config([(3, 8)] * 2, **sizes), memory=memory)
    else:
        cache = LinearKVCache(linear_config(num_mamba_layers=0, num_kv_heads=3, head_dim=8, **sizes), memory=memory)
    words = TABLES[layout].split()
    placed = {(int(slot), "KV".index(which), int(head)): int(at) for at, _, slot, which, _, head in zip(*[iter(words)] * 6, strict=True)}
    assert len(placed) == 12
    fill_all(cache, stream)
    for layer in range(2):
        combined, separate = cache.get_combined_kv_cache(layer), cache.get_separate_kv_cache(layer)
        # One allocation per layer of a KVCacheManager; layer 1 of a LinearKVCache starts at byte 1024 of its only one.
        start = 0 if kind == "manager" else 1024 * layer
        assert combined.allocation.nbytes == (1024 if kind == "manager" else 2048)
        expected = whole(combined).numpy()
        for (slot, which, head), offset in placed.items():
            rows = expected[start + offset :][:80].reshape(5, 8, 2)
            assert np.array_equal(as_bytes(combined)[slot, which, head], rows)
            assert np.array_equal(as_bytes(separate[which])[slot, head], rows)
        for slot in range(2):
            for which, view in enumerate(separate):
                written = np.random.default_rng([layer, slot, which]).integers(0, 256, (1, 3, 5, 16), np.uint8)
                memory.upload(view[slot : slot + 1], written.view(np.float16), stream=stream)
                memory.synchronize(stream)
                for head in range(3):
                    offset = start + placed[slot, which, head]
                    expected[offset : offset + 80] = written[0, head].reshape(-1)
        assert np.array_equal(whole(combined).numpy(), expected)
    cache.close()


@KINDS
def test_scales(memory, kind):
    scales = {"k_scale": 0.5, "v_scale": 0.1}
    if kind == "linear":
        cache, expected = make_cache(kind, memory, dtype="float8_e4m3fn", **scales), [[0.5, 0.1]] * 2
    else:
        layers = [KVLayerConfig(num_kv_heads=2, head_dim=16, **scales), KVLayerConfig(num_kv_heads=1, head_dim=32, k_scale=3)]
        cache, expected = make_cache(kind, memory, layers=layers, dtype="int8"), [[0.5, 0.1], [3.0, 1.0]]
    with cache:
        assert (cache.kv_scales.shape, cache.kv_scales.dtype, cache.kv_scales.ptr % 256) == ((2, 2), "float32", 0)
        assert np.array_equal(cache.kv_scales.numpy(), np.array(expected, np.float32))
    with make_cache(kind, memory) as cache:
        assert cache.kv_scales is None


class Stale(HostMemory):
    """Memory whose bytes are NaN in every float format until somebody asks for zeros."""

    def allocate(self, nbytes, *, zeroed=False, stream):
        allocation = super().allocate(nbytes, zeroed=zeroed, stream=stream)
        if not zeroed:
            allocation.storage[:] = 0x7F
        return allocation


@KINDS
@LAYOUTS
def test_everything_starts_as_zero(kind, layout):
    with make_cache(kind, Stale(), dtype="float8_e4m3fn", layout=layout) as cache:
        assert not any(whole(tensor).numpy().any() for tensor in [*rows_of(cache), cache.lengths.tensor])


class TestLife:
    @KINDS
    def test_close_is_idempotent_and_the_context_manager_closes(self, memory, kind):
        cache = make_cache(kind, memory, dtype="int8")
        tensors = [cache.get_combined_kv_cache(0), *cache.get_separate_kv_cache(1), cache.kv_scales, cache.lengths.tensor]
        with pytest.raises(ZeroDivisionError), cache:
            _ = 1 / 0
        assert (cache.closed, memory.live_nbytes) == (True, 0)
        cache.close()
        assert memory.live_nbytes == 0
        for tensor in tensors:
            with pytest.raises(ClosedError, match="closed"):
                tensor.numpy()

    @KINDS
    def test_the_last_view_or_dlpack_consumer_frees_the_memory(self, kind):
        memory = HostMemory()
        cache = make_cache(kind, memory)
        fill_all(cache, memory.create_stream())
        view = cache.get_combined_kv_cache(1)
        owner = view.allocation.storage
        while owner.base is not None:
            owner = owner.base
        storage = weakref.ref(owner)
        del owner
        expected = as_bytes(view)
        consumer = np.from_dlpack(view[1:2])
        cache.close()
        assert memory.live_nbytes == 0
        del cache, view
        gc.collect()
        assert storage() is not None
        assert np.array_equal(as_bytes(consumer), expected[1:2])
        del consumer
        gc.collect()
        assert storage() is None
