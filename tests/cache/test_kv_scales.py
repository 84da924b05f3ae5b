"""Scales by token: what a capture takes with K and V, and what a restore and a compaction by a mapping on the device carry."""

import numpy as np
import pytest

from tests.cache.scene import OTHER_LAYOUT, WITH_ROWS
from tests.helpers.assertions import raises
from tests.helpers.caches import HEADS, LAYOUTS, Image, Unchanged, cache_holding, make_cache, on_device
from trt_kvcache.errors import DTypeError, ShapeError

#: Tokens, and between which slots they go: none, one, some, a whole row of four scales, and all of a slot.
MOVES = [(0, 0, 0), (1, 4, 0), (3, 2, 4), (4, 3, 2), (7, 1, 1)]
TOKEN = {"dtype": "int8", "scales": "token"}


@WITH_ROWS
@LAYOUTS
def test_a_capture_holds_the_scales_of_the_tokens(memory, stream, kind, layout):
    with cache_holding(kind, memory, stream, 5, 5, layout=layout, **TOKEN) as cache:
        count = len(cache.kv_config.layers)
        heads = [layer.num_kv_heads for layer in cache.kv_config.layers]
        for length, slot, _ in MOVES:
            saved = cache.capture_kv_cache(slot, length, stream=stream)
            assert [tensor.shape for tensor in saved[count:]] == [(2, h, -(-length // 4) * 4) for h in heads]
            assert {(tensor.dtype, tensor.is_contiguous) for tensor in saved[count:]} == {("float32", True)}
            for rows, tensor in zip(Image(cache).rows, saved[:count], strict=True):
                assert np.array_equal(tensor.numpy().view(np.uint8), rows[slot, :, :, :length])
            for scales, tensor in zip(Image(cache).scales, saved[count:], strict=True):
                found = tensor.numpy()[..., None].view(np.uint8)
                assert np.array_equal(found[:, :, :length], scales[slot, :, :, :length])


@WITH_ROWS
@LAYOUTS
def test_a_restore_into_another_slot_of_another_layout(memory, stream, kind, layout):
    source = cache_holding(kind, memory, stream, 5, 5, layout=layout, **TOKEN)
    target = cache_holding(kind, memory, stream, 1, 2, layout=OTHER_LAYOUT[layout], **TOKEN)
    with source, target:
        for length, from_slot, to_slot in MOVES:
            expected = Image(target)
            target.restore_kv_cache(source.capture_kv_cache(from_slot, length, stream=stream), to_slot, stream=stream)
            for into, rows in zip(expected.rows, Image(source).rows, strict=True):
                into[to_slot, :, :, :length] = rows[from_slot, :, :, :length]
            expected.move_scales(to_slot, Image(source).scales, from_slot, length)
            expected.check(target)


@LAYOUTS
def test_a_mapping_on_the_device(memory, stream, layout):
    lengths, mapping = [7, 5, 2, 4, 3], [-1, 0, -1, 1, 2]
    with cache_holding("scaled", memory, stream, *lengths, layout=layout) as cache:
        expected = Image(cache)
        expected.compact(mapping, lengths)
        cache.compact_batch(on_device(memory, mapping, stream), 5, 3, stream=stream)
        expected.check(cache)


def saved_of(memory, stream, length, scales=None, dtype=np.float32):
    """K and V of so many tokens, and scales of others, as a capture looks like."""
    scales = -(-length // 4) * 4 if scales is None else scales
    kv = [memory.to_device(np.ones((2, h, length, d), np.int8), stream=stream) for h, d in HEADS]
    return kv + [memory.to_device(np.ones((2, h, scales), dtype), stream=stream) for h, _ in HEADS]


SIX = "saved: expected 6 tensors, one per attention layer and its scales"
BAD = {
    "no scales": (
        lambda *of: saved_of(*of, 5)[:3],
        ShapeError,
        "saved: expected 6 tensors, one per attention layer and its scales, got 3.",
    ),
    "too many": (
        lambda *of: saved_of(*of, 5) * 2,
        ShapeError,
        "saved: expected 6 tensors, one per attention layer and its scales, got 12.",
    ),
    "of fewer tokens": (lambda *of: saved_of(*of, 5, 4), ShapeError, "saved scales[0]: expected shape (2, 2, 8), got (2, 2, 4)."),
    "not rounded up": (lambda *of: saved_of(*of, 5, 5), ShapeError, "saved scales[0]: expected shape (2, 2, 8), got (2, 2, 5)."),
    "another dtype": (
        lambda *of: saved_of(*of, 5, dtype=np.float16),
        DTypeError,
        "saved scales[0]: expected float32, got float16.",
    ),
    "None": (lambda *_: None, ShapeError, "saved: expected a sequence of tensors, one per attention layer and its scales, got NoneType."),
}


@pytest.mark.parametrize(("make", "error", "text"), BAD.values(), ids=BAD)
def test_what_cannot_be_restored(memory, stream, make, error, text):
    with cache_holding("scaled", memory, stream, 3, 5) as cache:
        saved = make(memory, stream)
        with Unchanged(cache), pytest.raises(error) as caught:
            cache.restore_kv_cache(saved, 1, stream=stream)
        assert str(caught.value) == text


def test_scales_are_not_taken_where_there_are_none(memory, stream):
    with make_cache("manager", memory, dtype="int8") as cache, raises(ShapeError, "saved", "3 tensors, one per"):
        cache.restore_kv_cache(saved_of(memory, stream, 5), 1, stream=stream)
