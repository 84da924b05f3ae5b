"""K and V of ``KVCacheManager`` and ``LinearKVCache``: views, bytes, scales, DLPack."""

import ml_dtypes
import numpy as np
import pytest

from tests.cache.scene import HEADS, B, S, kv_config
from tests.helpers.caches import LAYOUTS, Unchanged, fill_all, whole
from trt_kvcache import (
    CacheConfig,
    HostMemory,
    KVCacheConfig,
    KVCacheManager,
    KVLayerConfig,
    KVLayout,
    LinearKVCache,
    estimate_memory,
)
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.errors import (
    ConfigError,
    LayerIndexError,
)

KINDS = pytest.mark.parametrize("kind", [KVCacheManager, LinearKVCache], ids=lambda kind: kind.__name__)


def make(kind, memory, **changes):
    """A cache of the kind, of two layers."""
    if kind is KVCacheManager:
        return KVCacheManager(kv_config(HEADS[:2], **changes), memory=memory)
    fields = {"num_attention_layers": 2, "max_batch_size": B, "max_sequence_length": S, "num_kv_heads": 2, "head_dim": 16}
    return LinearKVCache(CacheConfig(**{**fields, **changes}), memory=memory)


def as_bytes(tensor):
    """The elements of a view as bytes [..., itemsize]: NaN compares equal to itself."""
    array = np.ascontiguousarray(tensor.numpy())
    return array.view(np.uint8).reshape(*array.shape, array.dtype.itemsize)


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


def placed_rows(layout):
    """(slot, K or V, head) -> byte at which its row of token 0 starts."""
    words = TABLES[layout].split()
    entries = [words[start : start + 6] for start in range(0, len(words), 6)]
    return {(int(slot), "KV".index(which), int(head)): int(offset) for offset, _, slot, which, _, head in entries}


def table_cache(kind, memory, layout):
    if kind is KVCacheManager:
        layers = [KVLayerConfig(num_kv_heads=3, head_dim=8)] * 2
        return KVCacheManager(KVCacheConfig(layers=layers, max_batch_size=2, max_sequence_length=5, layout=layout), memory=memory)
    config = CacheConfig(num_attention_layers=2, max_batch_size=2, max_sequence_length=5, num_kv_heads=3, head_dim=8, layout=layout)
    return LinearKVCache(config, memory=memory)


@KINDS
@LAYOUTS
def test_views_read_the_bytes_of_the_table(memory, stream, kind, layout):
    with table_cache(kind, memory, layout) as cache:
        written = fill_all(cache, stream)
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
        assert whole(cache.get_combined_kv_cache(0)).nbytes == (1024 if kind is KVCacheManager else 2048)


@KINDS
@LAYOUTS
def test_rows_written_through_a_view_land_where_the_table_says(memory, stream, kind, layout):
    with table_cache(kind, memory, layout) as cache:
        fill_all(cache, stream, value=0xEE)
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
            storage = whole(cache.get_combined_kv_cache(layer)).numpy()
            assert np.array_equal(storage if kind is KVCacheManager else storage[1024 * layer : 1024 * (layer + 1)], expected)


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
def test_static_scales(memory, kind):
    scales = {"k_scale": 0.5, "v_scale": 0.1}
    if kind is LinearKVCache:
        cache = make(kind, memory, dtype="float8_e4m3fn", **scales)
        expected = [[[0.5] * 2, [0.1] * 2]] * 2
    else:
        layers = [KVLayerConfig(num_kv_heads=2, head_dim=16, **scales), KVLayerConfig(num_kv_heads=1, head_dim=32, k_scale=3)]
        cache = KVCacheManager(kv_config(layers=layers, dtype="int8"), memory=memory)
        expected = [[[0.5] * 2, [0.1] * 2], [[3.0], [1.0]]]
    with cache:
        assert cache.kv_config.scales == "tensor"
        for layer, values in enumerate(expected):
            tensor = cache.get_kv_scales(layer)
            assert (tensor.dtype, tensor.is_contiguous, tensor.ptr % 256) == ("float32", True, 0)
            assert np.array_equal(tensor.numpy(), np.array(values, np.float32))
        assert cache.kv_scale_rows is None
        assert cache.nbytes == estimate_memory(cache.config).nbytes == sum(x.nbytes for x in cache.kv_config.storages) + 2 * 256
    with make(kind, memory) as cache:
        assert cache.get_kv_scales(0) is None


@KINDS
def test_scales_by_head(memory, kind):
    scales = {"k_scale": [0.5, 0.25], "v_scale": 3}
    if kind is LinearKVCache:
        cache = make(kind, memory, dtype="int8", **scales)
    else:
        cache = KVCacheManager(kv_config(layers=[KVLayerConfig(num_kv_heads=2, head_dim=16, **scales)] * 2, dtype="int8"), memory=memory)
    with cache:
        assert cache.kv_config.scales == "head"
        assert [cache.get_kv_scales(layer).numpy().tolist() for layer in (0, 1)] == [[[0.5, 0.25], [3.0, 3.0]]] * 2


@KINDS
@LAYOUTS
def test_scales_by_token_lie_as_k_and_v_do(memory, stream, kind, layout):
    with make(kind, memory, dtype="int8", scales="token", layout=layout) as cache:
        storages, extent = cache.kv_config.scale_storages, 0
        for layer, storage in enumerate(storages):
            scales, rows = cache.get_kv_scales(layer), cache.get_combined_kv_cache(layer)
            slots, _, heads, tokens, _ = rows.shape
            padded = -(-tokens // 4) * 4
            assert (scales.shape, scales.dtype, scales.ptr % 256) == ((slots, 2, heads, padded), "float32", 0)
            head = heads * padded
            slot_and_kv = (2 * head, head) if layout is KVLayout.COMBINED else (head, storage.nbytes // 8)
            assert scales.strides == (*slot_and_kv, padded, 1)
            assert scales.offset == extent
            extent += storage.nbytes
        assert cache.kv_scale_rows.num_layers == len(storages)
        assert extent == cache.kv_config.scales_nbytes == whole(cache.get_kv_scales(0)).nbytes
        with pytest.raises(LayerIndexError, match=r"^attn_layer_idx 5: expected "):
            cache.get_kv_scales(5)


def infos_nbytes(cache):
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

    def allocate(self, nbytes, *, zeroed=False, stream):
        allocation = super().allocate(nbytes, zeroed=zeroed, stream=stream)
        if not zeroed:
            allocation.storage[:] = 0x7F
        return allocation


@KINDS
@LAYOUTS
def test_everything_starts_as_zero(kind, layout):
    with make(kind, Stale(), dtype="float8_e4m3fn", layout=layout) as cache:
        for index in range(2):
            assert not whole(cache.get_combined_kv_cache(index)).numpy().any()
        assert not cache.lengths.tensor.numpy().any()


class TestDlpack:
    """On the host: the exchange with NumPy. The device's is in tests/memory/test_dlpack.py."""

    @KINDS
    @LAYOUTS
    @pytest.mark.parametrize("dtype", ["float16", "float32", "int8"])
    def test_numpy_sees_the_same_bytes(self, kind, layout, dtype):
        memory = HostMemory()
        with make(kind, memory, dtype=dtype, layout=layout) as cache:
            fill_all(cache, memory.create_stream())
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
            with pytest.raises(RuntimeError, match="Unsupported dtype"):  # NumPy's own: others, such as torch, take it
                np.from_dlpack(cache.get_combined_kv_cache(0))
            assert cache.get_combined_kv_cache(0).numpy().dtype == ours

    def test_numpy_copies(self, memory):
        with make(KVCacheManager, memory) as cache:
            copied = cache.get_combined_kv_cache(0).numpy()
            copied[:] = 1
            assert not cache.get_combined_kv_cache(0).numpy().any()


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
def test_a_layer_out_of_range(memory, kind, getter, index, text):
    with make(kind, memory) as cache, Unchanged(cache), pytest.raises(LayerIndexError) as caught:
        getattr(cache, getter)(index)
    assert str(caught.value) == text
