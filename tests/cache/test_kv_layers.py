"""Capture and restore of K and V: which bytes, from one layout into the other, and what is refused."""

import gc
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.cache_cases import (
    HEADS,
    KINDS,
    STATES,
    CapturingMemory,
    Image,
    Unchanged,
    fill_all,
    make_cache,
    rows_of,
    state_of,
    states_of,
)
from tests.simt.standin import ALLOCATIONS, WAITS, StandIn, needs_standin
from trt_kvcache import CacheConfig, HostMemory, KVCacheConfig, KVCacheManager, KVLayerConfig, KVLayout, LinearKVCache
from trt_kvcache.errors import (
    CapacityError,
    CaptureError,
    ClosedError,
    DTypeError,
    LayoutError,
    PlaceError,
    RangeError,
    ShapeError,
    SlotError,
)
from trt_kvcache.memory.tensor import DeviceTensor

LAYOUTS = pytest.mark.parametrize("layout", list(KVLayout), ids=lambda layout: layout.value)
OTHER = {KVLayout.COMBINED: KVLayout.SEPARATE, KVLayout.SEPARATE: KVLayout.COMBINED}
KV_KINDS = pytest.mark.parametrize("kind", ["manager", "linear", "hybrid"])
RECURRENT, CONV = ("capture_recurrent_states", "restore_recurrent_states"), ("capture_conv_states", "restore_conv_states")


def bytes_of(tensor):
    """A tensor as bytes [..., row]: NaN is equal to itself."""
    return tensor.numpy().view(np.uint8)


@KV_KINDS
@LAYOUTS
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn", "int8"])
def test_k_and_v_from_one_layout_into_the_other(memory, stream, kind, layout, dtype):
    source = make_cache(kind, memory, layout=layout, dtype=dtype)
    target = make_cache(kind, memory, layout=OTHER[layout], dtype=dtype)
    target.reset_for_new_sequences([1, 2], stream=stream)
    for length, from_slot, to_slot in ((0, 0, 0), (1, 4, 0), (3, 2, 4), (7, 1, 1)):
        fill_all(source, stream, length)
        fill_all(target, stream, 50 + length)
        rows, expected, lengths = Image(source).rows, Image(target), state_of(target)["mirror"]
        with Unchanged(source):
            saved = source.capture_kv_cache(from_slot, length, stream=stream)
            heads = [HEADS[0]] * 2 if kind == "linear" else HEADS
            assert [tensor.shape for tensor in saved] == [(2, h, length, d) for h, d in heads]
            for array, tensor in zip(rows, saved, strict=True):
                assert (tensor.dtype, tensor.memory, tensor.is_contiguous) == (dtype, memory, True)
                assert not length or tensor.ptr % 256 == 0
                assert np.array_equal(bytes_of(tensor), array[from_slot, :, :, :length])
            target.restore_kv_cache(saved, to_slot, stream=stream)
            for into, array in zip(expected.rows, rows, strict=True):
                into[to_slot, :, :, :length] = array[from_slot, :, :, :length]
            expected.check(target)
            del saved, tensor
        assert (state_of(target)["mirror"], target.kv_cache_lengths.numpy().tolist()) == (lengths, [1, 2])
    source.close()
    target.close()


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


def one_layer_kinds(memory, **changes):
    """A cache of three equal layers of each kind that has K and V in its own way."""
    layer = KVLayerConfig(num_kv_heads=2, head_dim=changes.pop("head_dim"))
    fields = {"max_batch_size": 3, "max_sequence_length": 5, **changes}
    manager = KVCacheManager(KVCacheConfig(layers=[layer] * 3, **fields), memory=memory)
    linear = CacheConfig(num_attention_layers=3, num_kv_heads=2, head_dim=layer.head_dim, **fields)
    return [manager, LinearKVCache(linear, memory=memory)]


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
    cache.close()


@LAYOUTS
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_old_bug_fp8_pointer_stride(memory, stream, layout, dtype):
    """The original steps over elements of one byte as over elements of two: later layers and slots are not where they should be."""
    for cache in one_layer_kinds(memory, head_dim=32, dtype=dtype, layout=layout):
        check_that_rows_move(cache, stream)


@LAYOUTS
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_old_bug_head_dim_512(memory, stream, layout, dtype):
    """The original copies a part of such rows only: they are longer than one of its blocks reaches."""
    for cache in one_layer_kinds(memory, head_dim=512, dtype=dtype, layout=layout):
        check_that_rows_move(cache, stream)


@KV_KINDS
def test_what_is_captured_outlives_its_cache(memory, stream, kind):
    before = memory.live_nbytes
    with make_cache(kind, memory) as cache:
        fill_all(cache, stream)
        saved = cache.capture_kv_cache(2, 5, stream=stream)
        expected = [rows[2, :, :, :5].copy() for rows in Image(cache).rows]
    for tensor, rows in zip(saved, expected, strict=True):
        assert np.array_equal(bytes_of(tensor), rows)
    assert memory.live_nbytes - before == saved[0].allocation.nbytes
    del saved, tensor, cache
    gc.collect()
    assert memory.live_nbytes == before


def saved_kv(memory, length, stream, *, heads=HEADS, dtype=np.float16):
    return [memory.to_device(np.ones((2, h, length, d), dtype), stream=stream) for h, d in heads]


def test_saved_k_and_v_that_do_not_fit_change_nothing(memory, stream):
    host = HostMemory()
    other = host.create_stream()
    good = saved_kv(memory, 4, stream)
    wide = memory.to_device(np.ones((2, 2, 4, 32), np.float16), stream=stream)
    strided = DeviceTensor(wide.allocation, shape=(2, 2, 4, 16), dtype="float16", strides=(256, 128, 32, 1))
    folded = good[0].reshape(2, 2, 2, 2, 16)
    closed = saved_kv(memory, 4, stream)
    closed[2].allocation.close()
    bad = [
        ([], ShapeError, "saved: expected 3 tensors, one per attention layer, got 0."),
        (good[:2], ShapeError, "saved: expected 3 tensors, one per attention layer, got 2."),
        ([*good, good[0]], ShapeError, "saved: expected 3 tensors, one per attention layer, got 4."),
        (good[0], ShapeError, "saved: expected a sequence of tensors, one per attention layer, got DeviceTensor."),
        (None, ShapeError, "saved: expected a sequence of tensors, one per attention layer, got NoneType."),
        ([good[0], good[1], np.ones((2, 3, 4, 16))], PlaceError, f"saved[2]: expected a DeviceTensor of {memory.device}, got ndarray."),
        ([np.ones((2, 2, 4, 16)), *good[1:]], PlaceError, f"saved[0]: expected a DeviceTensor of {memory.device}, got ndarray."),
        (saved_kv(host, 4, other), PlaceError, "saved[0]: expected a tensor of the cache's memory, got one of another (cpu)."),
        (saved_kv(memory, 4, stream, dtype=np.float32), DTypeError, "saved[0]: expected float16, got float32."),
        ([*good[:2], saved_kv(memory, 4, stream, dtype=np.float32)[2]], DTypeError, "saved[2]: expected float16, got float32."),
        ([good[2], good[1], good[0]], ShapeError, "saved[0]: expected shape (2, 2, 4, 16), got (2, 3, 4, 16)."),
        ([*good[:2], saved_kv(memory, 3, stream)[2]], ShapeError, "saved[2]: expected shape (2, 3, 4, 16), got (2, 3, 3, 16)."),
        (
            saved_kv(memory, 4, stream, heads=[(2, 32), *HEADS[1:]]),
            ShapeError,
            "saved[0]: expected shape (2, 2, 4, 16), got (2, 2, 4, 32).",
        ),
        ([folded, *good[1:]], ShapeError, f"saved[0]: expected a tensor [2, H, n, D], got {folded!r}."),
        ([strided, *good[1:]], LayoutError, f"saved[0]: expected a dense tensor, got {strided!r}."),
        (closed, ClosedError, "saved[2]: the memory behind this tensor is closed."),
    ]
    with make_cache("hybrid", memory) as cache:
        cache.reset_for_new_sequences([3, 5], stream=stream)
        fill_all(cache, stream)
        for saved, error, text in bad:
            with Unchanged(cache), pytest.raises(error) as caught:
                cache.restore_kv_cache(saved, 1, stream=stream)
            assert str(caught.value) == text
        long = saved_kv(memory, 8, stream)
        with Unchanged(cache), pytest.raises(ShapeError) as caught:
            cache.restore_kv_cache(long, 1, stream=stream)
        assert str(caught.value) == f"saved[0]: expected at most max_sequence_length=7 tokens, got 8 in {long[0]!r}."


SLOTS = [
    (5, "slot 5: expected 0 <= slot < 5 (batch slots). Slots never wrap."),
    (-1, "slot -1: expected 0 <= slot < 5 (batch slots). Slots never wrap."),
    (1.0, "slot: expected an integer, got 1.0."),
]

LENGTHS = [
    (8, "sequence_length: expected an integer from 0 to 7, got 8."),
    (-1, "sequence_length: expected an integer from 0 to 7, got -1."),
    (2.0, "sequence_length: expected an integer, got 2.0."),
]


def calls(kind, saved):
    """Every capture and restore of a kind, with a slot, the tensors of a capture of one token, and a stream."""
    found = {}
    if kind != "mamba":
        found["capture_kv_cache"] = lambda cache, slot, stream: cache.capture_kv_cache(slot, 1, stream=stream)
        found["restore_kv_cache"] = lambda cache, slot, stream: cache.restore_kv_cache(saved["capture_kv_cache"], slot, stream=stream)
    if kind != "manager":
        for capture, restore in (RECURRENT, CONV):
            found[capture] = lambda cache, slot, stream, name=capture: getattr(cache, name)(slot, stream=stream)
            found[restore] = lambda cache, slot, stream, name=restore, of=capture: getattr(cache, name)(saved[of], slot, stream=stream)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_slots_lengths_and_streams_out_of_range_change_nothing(memory, stream, kind):
    with make_cache(kind, memory) as cache:
        cache.reset_for_new_sequences([3, 5], stream=stream)
        fill_all(cache, stream)
        saved = {}
        for name, call in calls(kind, saved).items():
            if name.startswith("capture"):
                saved[name] = call(cache, 0, stream)
        for call in calls(kind, saved).values():
            for slot, text in SLOTS:
                with Unchanged(cache), pytest.raises(SlotError) as caught:
                    call(cache, slot, stream)
                assert str(caught.value) == text
            with Unchanged(cache), pytest.raises(PlaceError, match=r"^stream: expected"):
                call(cache, 0, None)
        if kind != "mamba":
            for length, text in LENGTHS:
                with Unchanged(cache), pytest.raises(RangeError) as caught:
                    cache.capture_kv_cache(0, length, stream=stream)
                assert str(caught.value) == text
    for call in calls(kind, saved).values():
        with pytest.raises(ClosedError, match=rf"^this {type(cache).__name__} is closed\.$"):
            call(cache, 0, stream)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_it_is_captured_in_a_graph(kind):
    memory = CapturingMemory()
    stream = memory.create_stream()
    with make_cache(kind, memory) as cache:
        saved = {}
        saved.update({name: call(cache, 0, stream) for name, call in calls(kind, saved).items() if name.startswith("capture")})
        memory.capturing = True
        for name, call in calls(kind, saved).items():
            with Unchanged(cache), pytest.raises(CaptureError, match=f"^{name} cannot be captured: its host values"):
                call(cache, 0, stream)


@pytest.mark.parametrize("kind", KINDS)
def test_no_room_for_a_capture(kind):
    class Full(HostMemory):
        full = False

        def allocate(self, nbytes, *, zeroed=False, stream):
            if self.full:
                raise CapacityError("no room.")
            return super().allocate(nbytes, zeroed=zeroed, stream=stream)

    memory = Full()
    stream = memory.create_stream()
    with make_cache(kind, memory) as cache:
        fill_all(cache, stream)
        memory.full = True
        for name, call in calls(kind, {}).items():
            if name.startswith("capture"):
                with Unchanged(cache), pytest.raises(CapacityError, match=r"^no room\.$"):
                    call(cache, 0, stream)


@needs_standin
@pytest.mark.parametrize("kind", KINDS)
def test_restore_neither_waits_nor_allocates_and_launches_once(memory, stream, kind):
    with make_cache(kind, memory) as cache:
        saved = {}
        kept = []  # to let go of memory is to wait
        for run in range(2):  # the first time loads the kernels
            standin = StandIn()
            for name, call in calls(kind, saved).items():
                kept.append(call(cache, 0, stream))
                made = standin.take_calls()
                saved.update({name: kept[-1]} if name.startswith("capture") else {})
                launches = sum(call.startswith("cuLaunchKernel") for call in made)
                assert launches == (1 if "states" in name or kind == "linear" else 2)
                if run:
                    assert not {*made} & WAITS
                    assert sum(call in ALLOCATIONS for call in made) == name.startswith("capture")


def test_what_the_cases_are_about(memory):
    """A slot's states are no multiple of 16 bytes, and head dims repeat."""
    with make_cache("hybrid", memory) as cache:
        assert {tensor.nbytes // len(tensor) % 16 for tensor in states_of(cache)} == {8, 10}
        assert [tensor.shape for tensor in rows_of(cache)] == [(5, 2, h, 7, d) for h, d in HEADS]
        assert STATES["conv_dim"] * STATES["conv_kernel"] == 21
