"""``KVCacheManager``, and what it shares with ``LinearKVCache``: bytes, views, life, errors."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trt_kvcache import (
    CacheConfig,
    HostMemory,
    KVCacheConfig,
    KVCacheManager,
    KVLayerConfig,
    KVLayout,
    Lengths,
    LinearKVCache,
    estimate_memory,
)
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    DTypeError,
    LayerIndexError,
    PlaceError,
    RangeError,
    ShapeError,
    SlotError,
)

LAYOUTS = pytest.mark.parametrize("layout", list(KVLayout), ids=lambda layout: layout.value)
KINDS = pytest.mark.parametrize("kind", [KVCacheManager, LinearKVCache], ids=lambda kind: kind.__name__)

# B=3, S=7; layers of (H, D)
HEADS = [(2, 16), (1, 32), (4, 48)]
B, S = 3, 7


def kv_config(heads: Any = HEADS, **changes: Any) -> KVCacheConfig:
    layers = [KVLayerConfig(num_kv_heads=h, head_dim=d) for h, d in heads]
    return KVCacheConfig(**{"layers": layers, "max_batch_size": B, "max_sequence_length": S, **changes})


def make(kind: Any, memory: Any, **changes: Any) -> Any:
    """A cache of the kind, of two layers."""
    if kind is KVCacheManager:
        return KVCacheManager(kv_config(HEADS[:2], **changes), memory=memory)
    fields = {"num_attention_layers": 2, "max_batch_size": B, "max_sequence_length": S, "num_kv_heads": 2, "head_dim": 16}
    return LinearKVCache(CacheConfig(**{**fields, **changes}), memory=memory)


def as_bytes(tensor: Any) -> np.ndarray:
    """The elements of a view as bytes [..., itemsize]: NaN compares equal to itself."""
    array = np.ascontiguousarray(tensor.numpy())
    return array.view(np.uint8).reshape(*array.shape, array.dtype.itemsize)


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


def placed_rows(layout: KVLayout) -> dict[tuple[int, int, int], int]:
    """(slot, K or V, head) -> byte at which its row of token 0 starts."""
    words = TABLES[layout].split()
    entries = [words[start : start + 6] for start in range(0, len(words), 6)]
    return {(int(slot), "KV".index(which), int(head)): int(offset) for offset, _, slot, which, _, head in entries}


def table_cache(kind: Any, memory: Any, layout: KVLayout) -> Any:
    if kind is KVCacheManager:
        layers = [KVLayerConfig(num_kv_heads=3, head_dim=8)] * 2
        return KVCacheManager(KVCacheConfig(layers=layers, max_batch_size=2, max_sequence_length=5, layout=layout), memory=memory)
    config = CacheConfig(num_attention_layers=2, max_batch_size=2, max_sequence_length=5, num_kv_heads=3, head_dim=8, layout=layout)
    return LinearKVCache(config, memory=memory)


@KINDS
@LAYOUTS
def test_views_read_the_bytes_of_the_table(memory, stream, raw_bytes, fill, kind, layout):
    with table_cache(kind, memory, layout) as cache:
        written = fill(cache, stream=stream)
        for layer in range(2):
            # One allocation per layer of a KVCacheManager; layer 1 of a LinearKVCache starts at byte 1024 of its only one.
            storage = written[layer] if kind is KVCacheManager else written[0][1024 * layer :]
            combined = as_bytes(cache.get_combined_kv_cache(layer))
            separate = [as_bytes(view) for view in cache.get_separate_kv_cache(layer)]
            assert len(placed_rows(layout)) == 12
            for (slot, which, head), offset in placed_rows(layout).items():
                expected = storage[offset : offset + 80].reshape(5, 8, 2)
                assert np.array_equal(combined[slot, which, head], expected)
                assert np.array_equal(separate[which][slot, head], expected)
        assert raw_bytes(cache.get_combined_kv_cache(0)).nbytes == (1024 if kind is KVCacheManager else 2048)


@KINDS
@LAYOUTS
def test_rows_written_through_a_view_land_where_the_table_says(memory, stream, raw_bytes, fill, kind, layout):
    with table_cache(kind, memory, layout) as cache:
        fill(cache, stream=stream, value=0xEE)
        for layer in range(2):
            expected = np.full(1024, 0xEE, np.uint8)
            for (slot, which, head), offset in placed_rows(layout).items():
                expected[offset : offset + 80] = 100 * layer + 10 * slot + 3 * which + head
            for which, view in enumerate(cache.get_separate_kv_cache(layer)):
                for slot in range(2):
                    rows = np.empty((1, 3, 5, 16), np.uint8)
                    rows[:] = (100 * layer + 10 * slot + 3 * which + np.arange(3)).reshape(1, 3, 1, 1)
                    memory.upload(view[slot : slot + 1], rows.view(np.float16), stream=stream)
                    memory.synchronize(stream)
            storage = raw_bytes(cache.get_combined_kv_cache(layer)).numpy()
            assert np.array_equal(storage if kind is KVCacheManager else storage[1024 * layer : 1024 * (layer + 1)], expected)


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


@KINDS
@LAYOUTS
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn", "int8"])
def test_every_dtype_is_stored_and_read(memory, stream, kind, layout, dtype):
    with make(kind, memory, dtype=dtype, layout=layout) as cache:
        k, v = cache.get_separate_kv_cache(1)
        values = (np.arange(int(np.prod(k.shape[1:]))) % 97 - 48).reshape(1, *k.shape[1:]).astype(numpy_dtype(dtype))
        memory.upload(v[2:3], values, stream=stream)
        memory.synchronize(stream)
        assert v.numpy().dtype == numpy_dtype(dtype)
        assert np.array_equal(v.numpy()[2:3], values)
        assert not as_bytes(v)[:2].any()
        assert not as_bytes(k).any()
        assert np.array_equal(cache.get_combined_kv_cache(1).numpy()[2, 1], values[0])


@KINDS
def test_scales(memory, kind):
    scales = {"k_scale": 0.5, "v_scale": 0.1}
    if kind is LinearKVCache:
        cache = make(kind, memory, dtype="float8_e4m3fn", **scales)
        expected = [[0.5, 0.1]] * 2
    else:
        layers = [KVLayerConfig(num_kv_heads=2, head_dim=16, **scales), KVLayerConfig(num_kv_heads=1, head_dim=32, k_scale=3)]
        cache = KVCacheManager(kv_config(layers=layers, dtype="int8"), memory=memory)
        expected = [[0.5, 0.1], [3.0, 1.0]]
    with cache:
        assert (cache.kv_scales.shape, cache.kv_scales.dtype) == ((2, 2), "float32")
        assert np.array_equal(cache.kv_scales.numpy(), np.array(expected, np.float32))
        assert cache.kv_scales.ptr % 256 == 0
        assert cache.nbytes == estimate_memory(cache.config).nbytes == sum(x.nbytes for x in cache.kv_config.storages) + 256
    with make(kind, memory) as cache:
        assert cache.kv_scales is None


def infos_nbytes(cache: Any) -> int:
    """Bytes of the arrays that tell kernels where the layers are."""
    return sum(group.device_layer_infos.nbytes for group in cache.kv_head_dim_groups)


@KINDS
@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_bytes_are_counted_exactly(memory, kind, dtype):
    before = memory.live_nbytes
    cache = make(kind, memory, dtype=dtype)
    assert memory.live_nbytes - before == cache.nbytes + cache.lengths.nbytes + infos_nbytes(cache)
    assert cache.nbytes == cache.config.nbytes == estimate_memory(cache.config).nbytes
    cache.close()
    assert memory.live_nbytes == before


class Stale(HostMemory):
    """Memory whose bytes are NaN in every float format until somebody asks for zeros."""

    def allocate(self, nbytes: int, *, zeroed: bool = False, stream: Any) -> Any:
        allocation = super().allocate(nbytes, zeroed=zeroed, stream=stream)
        if not zeroed:
            allocation.storage[:] = 0x7F
        return allocation


@KINDS
@LAYOUTS
def test_everything_starts_as_zero(raw_bytes, kind, layout):
    with make(kind, Stale(), dtype="float8_e4m3fn", layout=layout) as cache:
        for index in range(2):
            assert not raw_bytes(cache.get_combined_kv_cache(index)).numpy().any()
        assert not cache.lengths.tensor.numpy().any()


def every_operation(cache: Any, stream: Any) -> None:
    memory = cache.memory
    cache.reset_for_new_sequences([1, 5], stream=stream)
    cache.commit_sequence_length(1, stream=stream)
    cache.commit_sequence_length([1, 0], stream=stream)
    cache.commit_sequence_length(memory.to_device(np.array([0, 1], np.int32), stream=stream), max_increment=1, stream=stream)
    cache.sync_lengths(stream=stream)
    cache.set_active_batch_size(3, stream=stream)
    cache.rewind(0, 2, stream=stream)
    cache.clear_slot(1, stream=stream)
    assert cache.host_kv_cache_lengths == (2, 0, 0)


@KINDS
@LAYOUTS
def test_no_operation_touches_k_and_v_or_moves_them(memory, stream, raw_bytes, fill, kind, layout):
    with make(kind, memory, layout=layout) as cache:
        written = fill(cache, stream=stream)
        views = [cache.get_combined_kv_cache(index) for index in range(2)]
        before = [view.ptr for view in views], cache.lengths.tensor.ptr, memory.live_nbytes
        every_operation(cache, stream)
        gc.collect()
        views = [cache.get_combined_kv_cache(index) for index in range(2)]
        assert ([view.ptr for view in views], cache.lengths.tensor.ptr, memory.live_nbytes) == before
        for view, expected in zip(views, written, strict=False):
            assert np.array_equal(raw_bytes(view).numpy(), expected)


def test_operations_do_not_allocate():
    class Counting(HostMemory):
        allocations = 0

        def allocate(self, nbytes: int, *, zeroed: bool = False, stream: Any) -> Any:
            self.allocations += 1
            return super().allocate(nbytes, zeroed=zeroed, stream=stream)

    memory = Counting()
    with KVCacheManager(kv_config(dtype="int8"), memory=memory) as cache:
        made = len(HEADS) + 1 + len(HEADS) + 1  # layers, scales, infos of three head dims, lengths
        assert memory.allocations == made
        stream = memory.create_stream()
        every_operation(cache, stream)
        cache.compact_batch([2, 0, 1], 3, 3, stream=stream)
        assert memory.allocations == made + 1  # the test's own tensor


class TestSharedLengths:
    def test_two_managers_over_one_object(self, memory, stream):
        lengths = Lengths(B, S, memory=memory)
        first = KVCacheManager(kv_config(), memory=memory, lengths=lengths)
        second = LinearKVCache(
            CacheConfig(num_attention_layers=2, max_batch_size=B, max_sequence_length=S, num_kv_heads=2, head_dim=16),
            memory=memory,
            lengths=lengths,
        )
        first.reset_for_new_sequences([1, 2], stream=stream)
        second.commit_sequence_length(3, stream=stream)
        assert first.lengths is second.lengths is lengths
        assert first.host_kv_cache_lengths == second.host_kv_cache_lengths == (4, 5)
        assert first.kv_cache_lengths.ptr == second.kv_cache_lengths.ptr
        infos = infos_nbytes(first) + infos_nbytes(second)
        assert memory.live_nbytes == first.nbytes + second.nbytes + lengths.nbytes + infos
        first.close()
        second.commit_sequence_length(1, stream=stream)
        second.close()
        assert memory.live_nbytes == lengths.nbytes
        lengths.close()

    @pytest.mark.parametrize(("batch", "length"), [(B + 1, S), (B, S - 1)])
    def test_of_other_sizes_are_refused(self, memory, batch, length):
        lengths = Lengths(batch, length, memory=memory)
        with pytest.raises(ConfigError) as caught:
            KVCacheManager(kv_config(), memory=memory, lengths=lengths)
        assert str(caught.value) == f"lengths: expected those of 3 slots of 7 tokens, got {batch} slots of {length}."
        assert memory.live_nbytes == lengths.nbytes
        lengths.close()

    def test_of_another_memory_are_refused(self, memory):
        lengths = Lengths(B, S, memory=HostMemory())
        before = memory.live_nbytes
        with pytest.raises(PlaceError) as caught:
            KVCacheManager(kv_config(), memory=memory, lengths=lengths)
        assert str(caught.value) == "lengths: expected those of the memory that the cache is in, got another one's (cpu)."
        assert memory.live_nbytes == before


class TestDlpack:
    """On the host: the exchange with NumPy. The device's is in test_cuda_memory.py."""

    @KINDS
    @LAYOUTS
    @pytest.mark.parametrize("dtype", ["float16", "float32", "int8"])
    def test_numpy_sees_the_same_bytes(self, fill, kind, layout, dtype):
        memory = HostMemory()
        with make(kind, memory, dtype=dtype, layout=layout) as cache:
            fill(cache, stream=memory.create_stream())
            for view in (cache.get_combined_kv_cache(1), *cache.get_separate_kv_cache(1), cache.lengths.tensor):
                array = np.from_dlpack(view)
                assert array.ctypes.data == view.ptr
                assert (array.shape, array.dtype) == (view.shape, numpy_dtype(view.dtype))
                assert tuple(stride // array.dtype.itemsize for stride in array.strides) == view.strides
                assert np.array_equal(as_bytes(view), np.ascontiguousarray(array).view(np.uint8).reshape(as_bytes(view).shape))

    @LAYOUTS
    def test_a_row_written_by_numpy_is_in_the_cache(self, layout):
        cache = make(KVCacheManager, HostMemory(), layout=layout)
        v = np.from_dlpack(cache.get_separate_kv_cache(0)[1])
        v[2, 1, 6, :] = np.arange(16)
        assert np.array_equal(cache.get_combined_kv_cache(0).numpy()[2, 1, 1, 6], np.arange(16))
        assert np.count_nonzero(cache.get_combined_kv_cache(0).numpy()) == 15

    @pytest.mark.parametrize(("dtype", "ours"), [("bfloat16", ml_dtypes.bfloat16), ("float8_e4m3fn", ml_dtypes.float8_e4m3fn)])
    def test_dtypes_that_numpy_does_not_know_are_copied_instead(self, dtype, ours):
        with make(KVCacheManager, HostMemory(), dtype=dtype) as cache:
            with pytest.raises(DTypeError) as caught:
                np.from_dlpack(cache.get_combined_kv_cache(0))
            assert str(caught.value) == f"DLPack from host memory: NumPy does not know {dtype}. Use .numpy(), which copies."
            assert cache.get_combined_kv_cache(0).numpy().dtype == ours

    def test_numpy_copies(self, memory):
        with make(KVCacheManager, memory) as cache:
            copied = cache.get_combined_kv_cache(0).numpy()
            copied[:] = 1
            assert not cache.get_combined_kv_cache(0).numpy().any()


class TestLife:
    @KINDS
    def test_close_is_idempotent_and_the_context_manager_closes(self, memory, kind):
        before = memory.live_nbytes
        with make(kind, memory) as cache:
            assert not cache.closed
        assert cache.closed
        assert memory.live_nbytes == before
        cache.close()
        cache.close()
        assert memory.live_nbytes == before

    def test_an_error_inside_closes_and_passes(self, memory):
        before = memory.live_nbytes
        with pytest.raises(ZeroDivisionError), make(KVCacheManager, memory):
            _ = 1 / 0
        assert memory.live_nbytes == before

    @KINDS
    def test_after_close_every_operation_and_address_is_refused(self, memory, stream, kind):
        cache = make(kind, memory, dtype="int8")
        tensors = [cache.get_combined_kv_cache(0), *cache.get_separate_kv_cache(1), cache.kv_scales, cache.lengths.tensor]
        increments = memory.to_device(np.zeros(0, np.int32), stream=stream)
        cache.close()
        for call in (
            lambda: cache.reset_for_new_sequences([], stream=stream),
            lambda: cache.commit_sequence_length(0, stream=stream),
            lambda: cache.commit_sequence_length([], stream=stream),
            lambda: cache.commit_sequence_length(increments, max_increment=0, stream=stream),
            lambda: cache.set_active_batch_size(0, stream=stream),
            lambda: cache.clear_slot(0, stream=stream),
            lambda: cache.rewind(0, 0, stream=stream),
            lambda: cache.sync_lengths(stream=stream),
            lambda: cache.compact_batch([], 0, 0, stream=stream),
            lambda: cache.capture_kv_cache(0, 1, stream=stream),
            lambda: cache.restore_kv_cache([], 0, stream=stream),
            lambda: cache.kv_head_dim_groups,
            lambda: cache.get_combined_kv_cache(0),
            lambda: cache.get_separate_kv_cache(0),
            lambda: cache.kv_cache_lengths,
            lambda: cache.kv_scales,
            lambda: cache.__enter__(),
        ):
            with pytest.raises(ClosedError) as caught:
                call()
            assert str(caught.value) == f"this {kind.__name__} is closed."
        for tensor in tensors:
            for read in (lambda tensor=tensor: tensor.ptr, tensor.numpy, tensor.__dlpack__):
                with pytest.raises(ClosedError, match="closed"):
                    read()

    @KINDS
    def test_a_manager_is_never_copied(self, memory, kind):
        with make(kind, memory) as cache:
            for operation in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError) as caught:
                    operation(cache)
                assert str(caught.value) == f"a {kind.__name__} owns device memory and cannot be copied or pickled."

    @KINDS
    def test_a_view_keeps_its_owner_alive(self, memory, stream, fill, kind):
        before = memory.live_nbytes
        cache = make(kind, memory)
        fill(cache, stream=stream)
        view = cache.get_separate_kv_cache(0)[1][1:2]
        expected = as_bytes(view)
        owner = view.allocation.nbytes
        del cache
        gc.collect()
        assert memory.live_nbytes - before == owner
        assert np.array_equal(as_bytes(view), expected)
        del view
        gc.collect()
        assert memory.live_nbytes == before

    @KINDS
    def test_the_last_dlpack_consumer_frees_the_memory(self, fill, kind):
        memory = HostMemory()
        cache = make(kind, memory)
        fill(cache, stream=memory.create_stream())
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
        with pytest.raises(ClosedError):
            _ = view.ptr
        del cache, view
        gc.collect()
        assert np.array_equal(np.ascontiguousarray(first).view(np.uint8).reshape(expected.shape), expected)
        del first
        gc.collect()
        assert storage() is not None
        assert np.array_equal(np.ascontiguousarray(second).view(np.uint8).reshape(expected[1:2].shape), expected[1:2])
        del second
        gc.collect()
        assert storage() is None


class FailingMemory(HostMemory):
    """Host memory whose n-th call of one operation fails."""

    def __init__(self, operation: str, fails_at: int) -> None:
        super().__init__()
        self.operation, self.left = operation, fails_at

    def _count(self, operation: str) -> None:
        self.left -= operation == self.operation
        if self.left == 0:
            raise CapacityError(f"the {operation} failed.")

    def allocate(self, nbytes: int, *, zeroed: bool = False, stream: Any) -> Any:
        self._count("allocate")
        return super().allocate(nbytes, zeroed=zeroed, stream=stream)

    def upload(self, destination: Any, source: Any, *, stream: Any) -> None:
        self._count("upload")
        super().upload(destination, source, stream=stream)

    def synchronize(self, stream: Any) -> None:
        self._count("synchronize")
        super().synchronize(stream)

    def create_stream(self) -> Any:
        self._count("create_stream")
        return super().create_stream()


# An int8 cache: lengths, its layers (3, or 1 buffer), scales, infos of its head dims (3, or 1).
STEPS = [
    *[(KVCacheManager, "allocate", step) for step in range(1, 9)],
    *[(LinearKVCache, "allocate", step) for step in range(1, 5)],
    *[(kind, "upload", 1) for kind in (KVCacheManager, LinearKVCache)],
    *[(kind, what, step) for kind in (KVCacheManager, LinearKVCache) for what in ("synchronize", "create_stream") for step in (1, 2)],
]


def make_int8(kind: Any, memory: Any) -> Any:
    return KVCacheManager(kv_config(dtype="int8"), memory=memory) if kind is KVCacheManager else make(kind, memory, dtype="int8")


@pytest.mark.parametrize(("kind", "operation", "step"), STEPS)
def test_a_failed_construction_releases_everything(kind, operation, step):
    memory = FailingMemory(operation, step)
    gc.disable()  # release is not left to the garbage collector
    try:
        with pytest.raises(CapacityError) as caught:
            make_int8(kind, memory)
        assert str(caught.value) == f"the {operation} failed."
        assert memory.live_nbytes == 0
    finally:
        gc.enable()


@pytest.mark.parametrize(("kind", "operation", "calls"), [(KVCacheManager, "allocate", 8), (LinearKVCache, "allocate", 4)])
def test_the_steps_above_are_all_there_are(kind, operation, calls):
    memory = FailingMemory(operation, calls + 1)
    cache = make_int8(kind, memory)
    assert memory.left == 1
    cache.close()


def test_no_room_on_the_host():
    memory = HostMemory()
    kv = kv_config([(1 << 30, 16), (1, 16)], max_batch_size=2**31 - 1, max_sequence_length=2**31 - 1)
    with pytest.raises(CapacityError, match="could not be allocated"):
        KVCacheManager(kv, memory=memory)
    assert memory.live_nbytes == 0


@pytest.mark.parametrize("kind", [KVCacheManager, LinearKVCache])
@pytest.mark.parametrize("config", [None, {"max_batch_size": 3}, "the other"])
def test_the_configuration_is_of_the_right_class(kind, config):
    other = {KVCacheManager: CacheConfig, LinearKVCache: KVCacheConfig}[kind]
    if config == "the other":
        fields = {"num_attention_layers": 2, "max_batch_size": B, "max_sequence_length": S, "num_kv_heads": 2, "head_dim": 16}
        config = CacheConfig(**fields) if other is CacheConfig else kv_config()
    expected = {KVCacheManager: "KVCacheConfig", LinearKVCache: "CacheConfig"}[kind]
    with pytest.raises(ConfigError) as caught:
        kind(config, memory=HostMemory())
    assert str(caught.value) == f"{kind.__name__}: expected a {expected}, got {type(config).__name__}."


BAD_LAYERS = [
    (2, "attn_layer_idx 2: expected 0 <= attn_layer_idx < 2. Indices never wrap."),
    (-1, "attn_layer_idx -1: expected 0 <= attn_layer_idx < 2. Indices never wrap."),
    (0.0, "attn_layer_idx: expected an integer, got 0.0."),
    (True, "attn_layer_idx: expected an integer, got True."),
    ("0", "attn_layer_idx: expected an integer, got '0'."),
    (None, "attn_layer_idx: expected an integer, got None."),
]


@KINDS
@pytest.mark.parametrize(("index", "text"), BAD_LAYERS)
@pytest.mark.parametrize("getter", ["get_combined_kv_cache", "get_separate_kv_cache", "get_layer_config"])
def test_a_layer_out_of_range(memory, unchanged, kind, getter, index, text):
    with make(kind, memory) as cache, unchanged(cache), pytest.raises(LayerIndexError) as caught:
        getattr(cache, getter)(index)
    assert str(caught.value) == text


#: Called on lengths [3, 4] of B=3, S=7. All forms of nonsense are in test_lengths.py; here K and V are watched too.
BAD = [
    ("reset_for_new_sequences", ([1] * 4,), RangeError, "reuse_lengths: expected at most max_batch_size=3 lengths, got 4."),
    ("reset_for_new_sequences", ([0, S + 1],), RangeError, "reuse_lengths[1]: expected an integer from 0 to 7, got 8."),
    ("reset_for_new_sequences", (np.array([0.5]),), DTypeError, "reuse_lengths: expected int32 values on the host, got float64."),
    ("commit_sequence_length", (-1,), RangeError, "increment: expected at least 0, got -1."),
    ("commit_sequence_length", ([0, -1],), RangeError, "increment[1]: expected at least 0, got -1."),
    ("commit_sequence_length", ([0],), ShapeError, "increment: expected one value for each of 2 active slots, got 1."),
    (
        "commit_sequence_length",
        (4,),
        CapacityError,
        "slot 1 holds 4 tokens; committing 4 more exceeds max_sequence_length=7. Nothing was changed.",
    ),
    (
        "commit_sequence_length",
        ([5, 4],),
        CapacityError,
        "slot 0 holds 3 tokens; committing 5 more exceeds max_sequence_length=7. Nothing was changed.",
    ),
    ("set_active_batch_size", (4,), RangeError, "active batch size: expected an integer from 0 to 3, got 4."),
    ("set_active_batch_size", (-1,), RangeError, "active batch size: expected an integer from 0 to 3, got -1."),
    ("clear_slot", (2,), SlotError, "slot 2: expected 0 <= slot < 2 (active slots). Slots never wrap."),
    ("clear_slot", (-1,), SlotError, "slot -1: expected 0 <= slot < 2 (active slots). Slots never wrap."),
    ("rewind", (-1, 0), SlotError, "slot -1: expected 0 <= slot < 2 (active slots). Slots never wrap."),
    ("rewind", (1, 5), RangeError, "rewind: slot 1 holds 4 tokens; expected 0 to 4, got 5."),
]


@KINDS
@pytest.mark.parametrize(("operation", "arguments", "error", "text"), BAD)
def test_bad_arguments_change_nothing(memory, stream, unchanged, fill, kind, operation, arguments, error, text):
    with make(kind, memory) as cache:
        fill(cache, stream=stream)
        cache.reset_for_new_sequences([3, 4], stream=stream)
        with unchanged(cache), pytest.raises(error) as caught:
            getattr(cache, operation)(*arguments, stream=stream)
        assert str(caught.value) == text


@KINDS
def test_a_stream_is_asked_for_by_name_and_must_be_one(memory, stream, unchanged, fill, kind):
    operations = {
        "reset_for_new_sequences": ([1],),
        "commit_sequence_length": (1,),
        "set_active_batch_size": (1,),
        "clear_slot": (0,),
        "rewind": (0, 0),
        "sync_lengths": (),
    }
    with make(kind, memory) as cache:
        fill(cache, stream=stream)
        cache.reset_for_new_sequences([3, 4], stream=stream)
        with unchanged(cache):
            for operation, arguments in operations.items():
                with pytest.raises(PlaceError, match=r"^stream: expected"):
                    getattr(cache, operation)(*arguments, stream=None)
                with pytest.raises(TypeError, match="stream"):
                    getattr(cache, operation)(*arguments)
                with pytest.raises(TypeError, match="positional"):
                    getattr(cache, operation)(*arguments, stream)


@pytest.mark.parametrize("name", ["active_batch_size", "host_kv_cache_lengths", "kv_cache_all_empty", "kv_cache_lengths"])
def test_lengths_are_not_told_after_close(name):
    cache = KVCacheManager(
        KVCacheConfig(layers=[KVLayerConfig(num_kv_heads=1, head_dim=8)], max_batch_size=2, max_sequence_length=3), memory=HostMemory()
    )
    cache.close()
    with pytest.raises(ClosedError, match=r"^this KVCacheManager is closed\."):
        getattr(cache, name)
