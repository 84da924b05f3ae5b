"""``KVCacheManager``, and what it shares with ``LinearKVCache``: bytes, views, life. What they refuse is in test_bad_inputs.py."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from cache_cases import HEADS, B, Image, S, fill_all, kv_config, linear_config, make_cache, rows_of, whole

from trt_kvcache import HostMemory, KVCacheManager, KVLayerConfig, KVLayout, Lengths, LinearKVCache
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.errors import ClosedError

LAYOUTS = pytest.mark.parametrize("layout", list(KVLayout), ids=lambda layout: layout.value)
KINDS = pytest.mark.parametrize("kind", ["manager", "linear"])


def as_bytes(view: Any) -> np.ndarray:
    """The elements of a view as bytes [..., itemsize]: NaN compares equal to itself."""
    array = np.ascontiguousarray(view if isinstance(view, np.ndarray) else view.numpy())
    return array.view(np.uint8).reshape(*array.shape, array.dtype.itemsize)


def test_what_it_says_about_itself(memory):
    kv = kv_config([(2, 16), (1, 32)], dtype="int8")
    with KVCacheManager(kv, memory=memory) as cache:
        assert cache.config is cache.kv_config is kv
        assert (cache.num_layers, cache.is_uniform, cache.memory, cache.closed) == (2, False, memory, False)
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
    sizes: dict[str, Any] = {"max_batch_size": 2, "max_sequence_length": 5, "layout": layout}
    if kind == "manager":
        cache: Any = KVCacheManager(kv_config([(3, 8)] * 2, **sizes), memory=memory)
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


@LAYOUTS
def test_views_of_layers_that_differ(memory, layout):
    with KVCacheManager(kv_config(dtype="float32", layout=layout), memory=memory) as cache:
        for index, (h, d) in enumerate(HEADS):
            combined, (k, v) = cache.get_combined_kv_cache(index), cache.get_separate_kv_cache(index)
            assert (combined.shape, k.shape, v.shape) == ((B, 2, h, S, d), (B, h, S, d), (B, h, S, d))
            assert combined.dtype == k.dtype == v.dtype == "float32"
            assert (combined.ptr, k.ptr % 256) == (k.ptr, 0)
            assert combined.is_contiguous is (layout is KVLayout.COMBINED)
            assert k.is_contiguous is v.is_contiguous is (layout is KVLayout.SEPARATE)
            slot = h * S * d
            padded = -(-B * slot * 4 // 256) * 64
            slots, apart = (2 * slot, slot) if layout is KVLayout.COMBINED else (slot, padded)
            assert combined.strides == (slots, apart, S * d, d, 1)
            assert k.strides == v.strides == (slots, S * d, d, 1)
            assert v.ptr - k.ptr == apart * 4


@KINDS
@LAYOUTS
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn", "int8"])
def test_every_dtype_is_stored_and_read(memory, stream, kind, layout, dtype):
    with make_cache(kind, memory, dtype=dtype, layout=layout) as cache:
        k, v = cache.get_separate_kv_cache(1)
        values = (np.arange(int(np.prod(k.shape[1:]))) % 97 - 48).reshape(1, *k.shape[1:]).astype(numpy_dtype(dtype))
        memory.upload(v[2:3], values, stream=stream)
        memory.synchronize(stream)
        expected = np.zeros(v.shape, numpy_dtype(dtype))
        expected[2] = values[0]
        assert v.numpy().dtype == numpy_dtype(dtype)
        assert np.array_equal(as_bytes(v), as_bytes(expected))
        assert not as_bytes(k).any()
        assert np.array_equal(cache.get_combined_kv_cache(1).numpy()[2, 1], values[0])


@KINDS
def test_scales(memory, kind):
    scales: dict[str, Any] = {"k_scale": 0.5, "v_scale": 0.1}
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
    """Memory whose bytes are NaN in every float format until somebody asks for zeros, and which counts allocations."""

    allocations = 0

    def allocate(self, nbytes: int, *, zeroed: bool = False, stream: Any) -> Any:
        self.allocations += 1
        allocation = super().allocate(nbytes, zeroed=zeroed, stream=stream)
        if not zeroed:
            allocation.storage[:] = 0x7F
        return allocation


@KINDS
@LAYOUTS
def test_everything_starts_as_zero(kind, layout):
    with make_cache(kind, Stale(), dtype="float8_e4m3fn", layout=layout) as cache:
        assert not any(whole(tensor).numpy().any() for tensor in [*rows_of(cache), cache.lengths.tensor])


@KINDS
@LAYOUTS
@pytest.mark.parametrize("place", ["memory", "stale"])
def test_no_operation_touches_k_and_v_moves_them_or_allocates(memory, kind, layout, place):
    memory = Stale() if place == "stale" else memory
    stream = memory.create_stream()
    with make_cache(kind, memory, layout=layout, **({} if kind == "manager" else {"num_mamba_layers": 0})) as cache:
        increments = memory.to_device(np.array([0, 1], np.int32), stream=stream)
        fill_all(cache, stream)
        expected, before = Image(cache), (cache.lengths.tensor.ptr, memory.live_nbytes, getattr(memory, "allocations", 0))
        cache.reset_for_new_sequences([1, 5], stream=stream)
        cache.commit_sequence_length(1, stream=stream)
        cache.commit_sequence_length([1, 0], stream=stream)
        cache.commit_sequence_length(increments, max_increment=1, stream=stream)
        cache.sync_lengths(stream=stream)
        cache.set_active_batch_size(3, stream=stream)
        cache.rewind(0, 2, stream=stream)
        cache.clear_slot(1, stream=stream)
        assert cache.host_kv_cache_lengths == (2, 0, 0)
        expected.check(cache)
        cache.compact_batch([2, 0, 1], 3, 3, stream=stream)
        gc.collect()
        assert (cache.lengths.tensor.ptr, memory.live_nbytes, getattr(memory, "allocations", 0)) == before


def test_two_managers_over_one_lengths(memory, stream):
    lengths = Lengths(B, S, memory=memory)
    first = KVCacheManager(kv_config(), memory=memory, lengths=lengths)
    second = LinearKVCache(linear_config(num_mamba_layers=0), memory=memory, lengths=lengths)
    first.reset_for_new_sequences([1, 2], stream=stream)
    second.commit_sequence_length(3, stream=stream)
    assert first.host_kv_cache_lengths == second.host_kv_cache_lengths == (4, 5)
    assert first.kv_cache_lengths.ptr == second.kv_cache_lengths.ptr == lengths.tensor.ptr
    first.close()
    second.commit_sequence_length(1, stream=stream)
    second.close()
    assert (memory.live_nbytes, lengths.host) == (lengths.nbytes, (5, 6))
    lengths.close()


@KINDS
@LAYOUTS
@pytest.mark.parametrize("dtype", ["float16", "float32", "int8"])
def test_numpy_sees_the_same_bytes_through_dlpack(kind, layout, dtype):
    memory = HostMemory()
    with make_cache(kind, memory, dtype=dtype, layout=layout) as cache:
        fill_all(cache, memory.create_stream())
        for view in (cache.get_combined_kv_cache(1), *cache.get_separate_kv_cache(1), cache.lengths.tensor):
            array = np.from_dlpack(view)
            assert (array.ctypes.data, array.shape, array.dtype) == (view.ptr, view.shape, numpy_dtype(view.dtype))
            assert tuple(stride // array.dtype.itemsize for stride in array.strides) == view.strides
            assert np.array_equal(as_bytes(view), as_bytes(array))
        row = np.from_dlpack(cache.get_separate_kv_cache(0)[1])[2, 1, 6]
        row[:] = np.arange(16)
        assert np.array_equal(cache.get_combined_kv_cache(0).numpy()[2, 1, 1, 6], row)


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
            for read in (lambda tensor=tensor: tensor.ptr, tensor.numpy, tensor.__dlpack__):
                with pytest.raises(ClosedError, match="closed"):
                    read()

    @KINDS
    def test_a_view_keeps_its_owner_alive(self, memory, stream, kind):
        cache = make_cache(kind, memory)
        fill_all(cache, stream)
        view = cache.get_separate_kv_cache(0)[1][1:2]
        expected = as_bytes(view)
        del cache
        gc.collect()
        assert memory.live_nbytes == view.allocation.nbytes
        assert np.array_equal(as_bytes(view), expected)
        del view
        gc.collect()
        assert memory.live_nbytes == 0

    @KINDS
    def test_the_last_dlpack_consumer_frees_the_memory(self, kind):
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
        first, second = np.from_dlpack(view), np.from_dlpack(view[1:2])
        cache.close()
        assert memory.live_nbytes == 0
        del cache, view
        gc.collect()
        assert np.array_equal(as_bytes(first), expected)
        del first
        gc.collect()
        assert storage() is not None
        assert np.array_equal(as_bytes(second), expected[1:2])
        del second
        gc.collect()
        assert storage() is None
