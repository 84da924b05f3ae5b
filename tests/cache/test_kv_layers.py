"""Capture and restore of K and V: which bytes, from one layout into the other, and what is refused.

That they are refused on a closed cache, without a stream and in a capture: test_cache_refusals.py.
"""

from dataclasses import replace

import numpy as np
import pytest

from tests.cache.scene import OTHER_LAYOUT, WITH_ROWS, driver_calls
from tests.helpers.caches import HEADS, LAYOUTS, B, FailingMemory, Image, S, Unchanged, cache_holding, fill_all, make_cache, state_of
from tests.simt.standin import ALLOCATIONS, WAITS, needs_standin
from trt_kvcache import CacheConfig, DeviceTensor, HostMemory, KVCacheConfig, KVCacheManager, KVLayerConfig, KVLayout, LinearKVCache
from trt_kvcache.errors import CapacityError, ClosedError, DTypeError, LayoutError, PlaceError, RangeError, ShapeError, SlotError

DTYPES = pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn", "int8"])
#: Tokens, and between which slots they go: none, one, some and all of a slot.
MOVES = [(0, 0, 0), (1, 4, 0), (3, 2, 4), (S, 1, 1)]


def heads_of(kind):
    """Heads and head dim of each layer."""
    return [HEADS[0]] * 2 if kind == "linear" else HEADS


def bytes_of(tensor):
    """A tensor as bytes [..., row]: NaN is equal to itself."""
    return tensor.numpy().view(np.uint8)


class TestCapture:
    @WITH_ROWS
    @LAYOUTS
    @DTYPES
    def test_holds_the_first_tokens_of_a_slot(self, memory, stream, kind, layout, dtype):
        with cache_holding(kind, memory, stream, 5, 5, layout=layout, dtype=dtype) as cache:
            for length, slot, _ in MOVES:
                saved = cache.capture_kv_cache(slot, length, stream=stream)
                for rows, tensor in zip(Image(cache).rows, saved, strict=True):
                    assert np.array_equal(bytes_of(tensor), rows[slot, :, :, :length])

    @WITH_ROWS
    @LAYOUTS
    def test_is_dense_whatever_the_layout(self, memory, stream, kind, layout):
        with cache_holding(kind, memory, stream, 5, layout=layout) as cache:
            saved = cache.capture_kv_cache(0, 3, stream=stream)
        assert [tensor.shape for tensor in saved] == [(2, h, 3, d) for h, d in heads_of(kind)]
        assert {(tensor.dtype, tensor.memory, tensor.is_contiguous) for tensor in saved} == {("float16", memory, True)}

    @WITH_ROWS
    def test_is_one_allocation_of_aligned_tensors(self, memory, stream, kind):
        with cache_holding(kind, memory, stream, 5) as cache:
            saved = cache.capture_kv_cache(0, 3, stream=stream)
        assert len({id(tensor.allocation) for tensor in saved}) == 1
        assert [tensor.ptr % 256 for tensor in saved] == [0] * len(saved)

    @WITH_ROWS
    def test_changes_nothing(self, memory, stream, kind):
        with cache_holding(kind, memory, stream, 5) as cache, Unchanged(cache):
            cache.capture_kv_cache(0, 3, stream=stream)

    @WITH_ROWS
    def test_outlives_its_cache(self, memory, stream, kind):
        before = memory.live_nbytes
        with cache_holding(kind, memory, stream, 0, 0, 5) as cache:
            saved = cache.capture_kv_cache(2, 5, stream=stream)
            expected = [rows[2, :, :, :5].copy() for rows in Image(cache).rows]
        for tensor, rows in zip(saved, expected, strict=True):
            assert np.array_equal(bytes_of(tensor), rows)
        assert memory.live_nbytes - before == saved[0].allocation.nbytes

    @WITH_ROWS
    def test_is_released_with_its_last_tensor(self, memory, stream, kind):
        with cache_holding(kind, memory, stream, 5) as cache:
            before = memory.live_nbytes
            last = cache.capture_kv_cache(0, 3, stream=stream)[-1]
            assert memory.live_nbytes > before
            del last
            assert memory.live_nbytes == before

    @WITH_ROWS
    def test_without_room(self, kind):
        memory = FailingMemory()
        stream = memory.create_stream()
        with cache_holding(kind, memory, stream, 5) as cache:
            memory.failures = 1
            with Unchanged(cache), pytest.raises(CapacityError, match=r"^no room\.$"):
                cache.capture_kv_cache(0, 3, stream=stream)

    @WITH_ROWS
    @pytest.mark.parametrize(
        ("slot", "length", "error", "text"),
        [
            (5, 1, SlotError, "slot 5: expected 0 <= slot < 5 (batch slots). Slots never wrap."),
            (-1, 1, SlotError, "slot -1: expected 0 <= slot < 5 (batch slots). Slots never wrap."),
            (1.0, 1, SlotError, "slot: expected an integer, got 1.0."),
            (0, 8, RangeError, "sequence_length: expected an integer from 0 to 7, got 8."),
            (0, -1, RangeError, "sequence_length: expected an integer from 0 to 7, got -1."),
            (0, 2.0, RangeError, "sequence_length: expected an integer, got 2.0."),
        ],
    )
    def test_out_of_range(self, memory, stream, kind, slot, length, error, text):
        with cache_holding(kind, memory, stream, 5) as cache:
            with Unchanged(cache), pytest.raises(error) as caught:
                cache.capture_kv_cache(slot, length, stream=stream)
            assert str(caught.value) == text

    @needs_standin
    @WITH_ROWS
    def test_is_a_launch_for_each_head_dim_and_one_allocation(self, memory, stream, kind):
        with cache_holding(kind, memory, stream, 5) as cache:
            made, launches = driver_calls(lambda: cache.capture_kv_cache(0, 3, stream=stream))
            assert launches == (1 if kind == "linear" else 2)
            assert (not {*made} & WAITS, sum(call in ALLOCATIONS for call in made)) == (True, 1)


class TestRestore:
    @WITH_ROWS
    @LAYOUTS
    @DTYPES
    def test_into_another_slot_of_another_layout(self, memory, stream, kind, layout, dtype):
        source = cache_holding(kind, memory, stream, 5, 5, layout=layout, dtype=dtype)
        target = cache_holding(kind, memory, stream, 1, 2, layout=OTHER_LAYOUT[layout], dtype=dtype)
        with source, target:
            for length, from_slot, to_slot in MOVES:
                expected = Image(target)
                target.restore_kv_cache(source.capture_kv_cache(from_slot, length, stream=stream), to_slot, stream=stream)
                for into, rows in zip(expected.rows, Image(source).rows, strict=True):
                    into[to_slot, :, :, :length] = rows[from_slot, :, :, :length]
                expected.check(target)

    @WITH_ROWS
    def test_leaves_the_lengths_alone(self, memory, stream, kind):
        with cache_holding(kind, memory, stream, 5, 2) as cache:
            before = state_of(cache)
            cache.restore_kv_cache(cache.capture_kv_cache(0, 5, stream=stream), 1, stream=stream)
            assert state_of(cache) == before

    @WITH_ROWS
    @pytest.mark.parametrize("slot", [5, -1, 1.0])
    def test_slots_out_of_range(self, memory, stream, kind, slot):
        with cache_holding(kind, memory, stream, 5) as cache:
            saved = cache.capture_kv_cache(0, 1, stream=stream)
            with Unchanged(cache), pytest.raises(SlotError, match=r"^slot( 5| -1)?: expected "):
                cache.restore_kv_cache(saved, slot, stream=stream)

    @needs_standin
    @WITH_ROWS
    def test_is_a_launch_for_each_head_dim_and_neither_waits_nor_allocates(self, memory, stream, kind):
        with cache_holding(kind, memory, stream, 5) as cache:
            saved = cache.capture_kv_cache(0, 3, stream=stream)
            made, launches = driver_calls(lambda: cache.restore_kv_cache(saved, 1, stream=stream))
            assert launches == (1 if kind == "linear" else 2)
            assert not {*made} & (WAITS | ALLOCATIONS)


def saved_kv(memory, length, stream, *, heads=HEADS, dtype=np.float16):
    """What a capture of so many tokens looks like."""
    return [memory.to_device(np.ones((2, h, length, d), dtype), stream=stream) for h, d in heads]


def strided(memory, stream):
    wide = memory.to_device(np.ones((2, 2, 4, 32), np.float16), stream=stream)
    return DeviceTensor(wide.allocation, shape=(2, 2, 4, 16), dtype="float16", strides=(256, 128, 32, 1))


def closed(tensors):
    tensors[2].allocation.close()
    return tensors


def foreign(length):
    host = HostMemory()
    return saved_kv(host, length, host.create_stream())


#: What is given in place of a capture of four tokens, made of it, of the memory and of a stream.
BAD = {
    "nothing": (lambda good, *_: [], ShapeError, "saved: expected 3 tensors, one per attention layer, got 0."),
    "too few": (lambda good, *_: good[:2], ShapeError, "saved: expected 3 tensors, one per attention layer, got 2."),
    "too many": (lambda good, *_: [*good, good[0]], ShapeError, "saved: expected 3 tensors, one per attention layer, got 4."),
    "one tensor": (
        lambda good, *_: good[0],
        ShapeError,
        "saved: expected a sequence of tensors, one per attention layer, got DeviceTensor.",
    ),
    "None": (lambda *_: None, ShapeError, "saved: expected a sequence of tensors, one per attention layer, got NoneType."),
    "an array first": (lambda good, *_: [np.ones(3), *good[1:]], PlaceError, "saved[0]: expected a DeviceTensor of DEVICE, got ndarray."),
    "an array last": (lambda good, *_: [*good[:2], np.ones(3)], PlaceError, "saved[2]: expected a DeviceTensor of DEVICE, got ndarray."),
    "another memory": (lambda *_: foreign(4), PlaceError, "saved[0]: expected a tensor of the cache's memory, got one of another (cpu)."),
    "another dtype": (
        lambda good, memory, stream: [*good[:2], saved_kv(memory, 4, stream, dtype=np.float32)[2]],
        DTypeError,
        "saved[2]: expected float16, got float32.",
    ),
    "another order": (lambda good, *_: good[::-1], ShapeError, "saved[0]: expected shape (2, 2, 4, 16), got (2, 3, 4, 16)."),
    "another length": (
        lambda good, memory, stream: [*good[:2], saved_kv(memory, 3, stream)[2]],
        ShapeError,
        "saved[2]: expected shape (2, 3, 4, 16), got (2, 3, 3, 16).",
    ),
    "another head dim": (
        lambda good, memory, stream: saved_kv(memory, 4, stream, heads=[(2, 32), *HEADS[1:]]),
        ShapeError,
        "saved[0]: expected shape (2, 2, 4, 16), got (2, 2, 4, 32).",
    ),
    "more dimensions": (
        lambda good, *_: [good[0].reshape(2, 2, 2, 2, 16), *good[1:]],
        ShapeError,
        "saved[0]: expected a tensor [2, H, n, D], got DeviceTensor((2, 2, 2, 2, 16), float16, DEVICE).",
    ),
    "strided": (
        lambda good, memory, stream: [strided(memory, stream), *good[1:]],
        LayoutError,
        "saved[0]: expected a dense tensor, got DeviceTensor((2, 2, 4, 16), float16, strides=(256, 128, 32, 1), DEVICE).",
    ),
    "closed": (lambda good, *_: closed(good), ClosedError, "saved[2]: the memory of this tensor is closed."),
    "too long": (
        lambda good, memory, stream: saved_kv(memory, 8, stream),
        ShapeError,
        "saved[0]: expected at most max_sequence_length=7 tokens, got 8 in DeviceTensor((2, 2, 8, 16), float16, DEVICE).",
    ),
}


@pytest.mark.parametrize(("make", "error", "text"), BAD.values(), ids=BAD)
def test_what_cannot_be_restored(memory, stream, make, error, text):
    with cache_holding("hybrid", memory, stream, 3, 5) as cache:
        saved = make(saved_kv(memory, 4, stream), memory, stream)
        with Unchanged(cache), pytest.raises(error) as caught:
            cache.restore_kv_cache(saved, 1, stream=stream)
        assert str(caught.value) == text.replace("DEVICE", memory.device)


# (L, B, S, H, D) of the contract.
@pytest.mark.parametrize("shape", [(3, 8, 1024, 4, 128), (3, 4, 512, 7, 64), (28, 1, 1024, 4, 128)], ids=str)
def test_copy_cases_of_the_contract(memory, stream, shape):
    layers, batch, longest, heads, head_dim = shape
    fields = {"num_attention_layers": layers, "max_batch_size": batch, "max_sequence_length": longest}
    config = CacheConfig(**fields, num_kv_heads=heads, head_dim=head_dim, layout=KVLayout.COMBINED)
    from_slot, to_slot = batch - 1, batch // 2
    with (
        LinearKVCache(config, memory=memory) as source,
        KVCacheManager(replace(config.kv, layout=KVLayout.SEPARATE), memory=memory) as target,
    ):
        rows = np.random.default_rng(0).integers(0, 2**16, (layers, 1, 2, heads, longest, head_dim), np.uint16)
        for layer in range(layers):
            memory.upload(source.get_combined_kv_cache(layer)[from_slot:], rows[layer].view(np.float16), stream=stream)
        memory.synchronize(stream)

        def check(length):
            for layer in range(layers):
                for which, view in enumerate(target.get_separate_kv_cache(layer)):
                    got = view[to_slot : to_slot + 1].numpy().view(np.uint16)
                    assert np.array_equal(got[:, :, :length], rows[layer, :, which, :, :length])
                    assert not got[:, :, length:].any()

        for length in (1, 47, 96, 97, 128, 255):
            target.restore_kv_cache(source.capture_kv_cache(from_slot, length, stream=stream), to_slot, stream=stream)
            check(length)
        if batch > 1:
            target.reset_for_new_sequences([0] * to_slot + [255], stream=stream)
            target.compact_batch([-1] * to_slot + [0], to_slot + 1, 1, stream=stream)
            to_slot = 0
            check(255)


@pytest.fixture(params=["manager", "linear"])
def cache_of(request, memory):
    """A function that makes a cache of three equal layers, with K and V in one allocation or in three."""

    def make(head_dim, **changes):
        layer = KVLayerConfig(num_kv_heads=2, head_dim=head_dim)
        fields = {"max_batch_size": 3, "max_sequence_length": 5, **changes}
        if request.param == "manager":
            return KVCacheManager(KVCacheConfig(layers=[layer] * 3, **fields), memory=memory)
        return LinearKVCache(CacheConfig(num_attention_layers=3, num_kv_heads=2, head_dim=head_dim, **fields), memory=memory)

    return make


def check_that_rows_move(cache, stream):
    """Capture a slot, restore it elsewhere, compact: in every layer, K and V, the right bytes and no others."""
    cache.reset_for_new_sequences([5, 3, 4], stream=stream)
    fill_all(cache, stream)
    expected = Image(cache)
    cache.restore_kv_cache(cache.capture_kv_cache(2, 4, stream=stream), 0, stream=stream)
    for rows in expected.rows:
        rows[0, :, :, :4] = rows[2, :, :, :4]
    expected.check(cache)
    expected.compact([-1, 1, 0], [5, 3, 4])
    cache.compact_batch([-1, 1, 0], 3, 2, stream=stream)
    expected.check(cache)


@LAYOUTS
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_old_bug_fp8_pointer_stride(cache_of, stream, layout, dtype):
    """The original steps over elements of one byte as over elements of two: later layers and slots are not where they should be."""
    with cache_of(32, dtype=dtype, layout=layout) as cache:
        check_that_rows_move(cache, stream)


@LAYOUTS
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_old_bug_head_dim_512(cache_of, stream, layout, dtype):
    """The original copies a part of such rows only: they are longer than one of its blocks reaches."""
    with cache_of(512, dtype=dtype, layout=layout) as cache:
        check_that_rows_move(cache, stream)


def test_head_dims_of_these_caches_repeat(memory):
    """So that a launch for each head dim is fewer than one for each layer."""
    with make_cache("hybrid", memory) as cache:
        assert [group.num_layers for group in cache.kv_head_dim_groups] == [2, 1]


class TestHostArrays:
    @LAYOUTS
    @pytest.mark.parametrize("first", [0, 2, S - 3])
    def test_are_written_from_a_token_on(self, memory, stream, layout, first):
        with cache_holding("manager", memory, stream, 5, layout=layout) as cache:
            expected = Image(cache)
            rows = [
                np.random.default_rng(index).integers(0, 2**16, (config.num_kv_heads, 3, config.head_dim), np.uint16).view(np.float16)
                for index, config in enumerate(layer for layer in cache.kv_config.layers for _ in range(2))
            ]
            cache.kv_layers.upload(rows, 2, first, stream=stream)
            memory.synchronize(stream)
            for index, array in enumerate(rows):
                expected.rows[index // 2][2, index % 2, :, first : first + 3] = array.view(np.uint8)
            expected.check(cache)

    @LAYOUTS
    def test_are_read_from_the_first_token_on(self, memory, stream, layout):
        with cache_holding("manager", memory, stream, 5, layout=layout) as cache:
            rows = [np.zeros((layer.num_kv_heads, 4, layer.head_dim), np.float16) for layer in cache.kv_config.layers for _ in range(2)]
            cache.kv_layers.download(rows, B - 1, stream=stream)
            memory.synchronize(stream)
            held = [whole[B - 1, side, :, :4] for whole in Image(cache).rows for side in (0, 1)]
            assert [array.tobytes() for array in rows] == [array.tobytes() for array in held]
