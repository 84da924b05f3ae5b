"""Capture and restore of K/V and of states: which bytes, and from one layout into the other."""

import numpy as np
import pytest

from tests.helpers.cache_cases import ALL_KINDS, HEADS, LAYOUTS, Image, Unchanged, fill_all, make_cache, state_of
from trt_kvcache import KVLayout

KV, RECURRENT, CONV = "kv_cache", "recurrent_states", "conv_states"


def parts_of(kind):
    """What can be captured from a cache, one call each."""
    return ([] if kind == "mamba" else [KV]) + ([] if kind == "manager" else [RECURRENT, CONV])


def capture(cache, part, slot, stream, length=1):
    return getattr(cache, f"capture_{part}")(*([slot, length] if part == KV else [slot]), stream=stream)


def restore(cache, part, saved, slot, stream):
    getattr(cache, f"restore_{part}")(saved, slot, stream=stream)


def views(image, part, slot, length):
    """The bytes of an image that a capture holds."""
    if part == KV:
        return [rows[slot, :, :, :length] for rows in image.rows]
    half = len(image.states) // 2
    return [states[slot] for states in (image.states[:half] if part == RECURRENT else image.states[half:])]


@ALL_KINDS
@LAYOUTS
@pytest.mark.parametrize("dtype", ["float16", "float32", "int8"])
def test_from_one_layout_into_the_other(memory, stream, kind, layout, dtype):
    ping_pong, other = layout is KVLayout.COMBINED, next(each for each in KVLayout if each is not layout)
    source, target = (make_cache(kind, memory, layout=each, dtype=dtype, ping_pong=ping_pong) for each in (layout, other))
    heads = [HEADS[0]] * 2 if kind == "linear" else HEADS
    target.reset_for_new_sequences([1, 2], stream=stream)
    before = state_of(target)
    with source, target:
        for length, from_slot, to_slot in ((0, 0, 0), (1, 4, 0), (3, 2, 4), (7, 1, 1)):
            shapes = {KV: [(2, h, length, d) for h, d in heads], RECURRENT: [(2, 3, 5)] * 2, CONV: [(7, 3)] * 2}
            fill_all(source, stream, length)
            fill_all(target, stream, 50 + length)
            held, expected = Image(source), Image(target)
            for part in parts_of(kind):
                with Unchanged(source):
                    saved = capture(source, part, from_slot, stream, length)
                    assert [tensor.shape for tensor in saved] == shapes[part]
                    assert len({id(tensor.allocation) for tensor in saved}) == 1
                    restore(target, part, saved, to_slot, stream)
                    arrays = views(held, part, from_slot, length), views(expected, part, to_slot, length)
                    for tensor, array, into in zip(saved, *arrays, strict=True):
                        assert tensor.dtype == {KV: dtype, RECURRENT: "float32", CONV: "float16"}[part]
                        assert (tensor.memory, tensor.is_contiguous, tensor.nbytes and tensor.ptr % 256) == (memory, True, 0)
                        assert np.array_equal(tensor.numpy().view(np.uint8), array)  # as bytes: NaN is equal to itself
                        into[:] = array
                    del saved, tensor
            expected.check(target)
            if kind != "manager":
                source.swap()
        assert state_of(target) == before


# (L, B, S, H, D) of the contract.
@pytest.mark.parametrize("shape", [(3, 8, 1024, 4, 128), (3, 4, 512, 7, 64), (28, 1, 1024, 4, 128)])
def test_copy_cases_of_the_contract(memory, stream, shape):
    layers, batch, longest, heads, head_dim = shape
    sizes = {"max_batch_size": batch, "max_sequence_length": longest}
    linear = {"num_attention_layers": layers, "num_mamba_layers": 0, "num_kv_heads": heads, "head_dim": head_dim}
    from_slot, to_slot = batch - 1, batch // 2
    with (
        make_cache("linear", memory, **linear, **sizes, layout=KVLayout.COMBINED) as source,
        make_cache("manager", memory, heads=[(heads, head_dim)] * layers, **sizes) as target,
    ):
        rows = np.random.default_rng(0).integers(0, 2**16, (layers, 1, 2, heads, longest, head_dim), np.uint16)
        for layer in range(layers):
            memory.upload(source.get_combined_kv_cache(layer)[from_slot:], rows[layer].view(np.float16), stream=stream)
        memory.synchronize(stream)

        for length in (1, 47, 96, 97, 128, 255):
            target.restore_kv_cache(source.capture_kv_cache(from_slot, length, stream=stream), to_slot, stream=stream)
            for layer in range(layers):
                for which, view in enumerate(target.get_separate_kv_cache(layer)):
                    got = view[to_slot : to_slot + 1].numpy().view(np.uint16)
                    assert np.array_equal(got[:, :, :length], rows[layer, :, which, :, :length])
                    assert not got[:, :, length:].any()


# The original steps over elements of one byte as over elements of two; copies only a part of rows that are longer than one of its
# blocks reaches; and takes the old batch for the slots of the buffer of states, so that later layers come from the wrong place.
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(32, "float8_e4m3fn"), (32, "int8"), (512, "float16"), (512, "float32")],
    ids=["fp8_pointer_stride", "int8_pointer_stride", "head_dim_512", "head_dim_512_float32"],  # each of them: states of a smaller batch
)
@LAYOUTS
@ALL_KINDS
def test_old_bugs(memory, stream, kind, layout, head_dim, dtype):
    """Capture a slot, restore it elsewhere, compact an old batch that is smaller than the cache: the right bytes and no others."""
    layers = {"head_dim": head_dim} if kind == "linear" else {"heads": [(2, head_dim)] * 3}
    with make_cache(kind, memory, layout=layout, dtype=dtype, ping_pong=True, **layers) as cache:
        cache.reset_for_new_sequences([5, 3, 4], stream=stream)
        fill_all(cache, stream)
        if kind != "manager":
            cache.swap()
        expected = Image(cache)
        for part in parts_of(kind):
            restore(cache, part, capture(cache, part, 2, stream, 4), 0, stream)
            for into, array in zip(views(expected, part, 0, 4), views(expected, part, 2, 4), strict=True):
                into[:] = array
        expected.check(cache)
        expected.compact([-1, 1, 0], [5, 3, 4])
        cache.compact_batch([-1, 1, 0], 3, 2, stream=stream)
        expected.check(cache)
