"""Rows of accepted paths of draft tokens: every byte of K, V and scales, on any memory; and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.assertions import raises
from tests.kernels.layers import LAYOUTS, check, make_layer
from trt_kvcache import HostMemory
from trt_kvcache.errors import ClosedError, DTypeError, PlaceError, ShapeError
from trt_kvcache.kernels import KVLayerInfos, keep_kv_cache_paths_batched

#: Starts, paths and counts; where it is not said, a path has as many tokens as are listed. S = 12.
PATHS = {
    "the rows of a chain stay": ([3, 0], [[0, 1, 2], [0]], None),
    "some are left out": ([2, 5], [[0, 2, 3, 7], [0, 1, 5]], None),
    "each goes where the next one was": ([1], [[0, 2, 3, 4, 5, 6, 7, 8, 9]], None),
    "no path": ([4, 2, 6], [[], [0, 3], []], None),
    "only the first tokens of a list": ([2, 1], [[0, 2, 5, 9], [0, 3, 4]], [2, 0]),
    "no root": ([0, 3], [[1, 2], [4]], None),
    "past the last row": ([7, 12, 2], [[0, 3, 4, 5, 6], [0, 2], [0, 10, 9]], None),
    "negative numbers": ([-1, 2], [[0, 2, 3], [-1, -3, 4]], [3, 3]),
    "tokens that would move up": ([2, 0], [[0, 4, 1, 2], [0, 0, 1]], None),
    "negative counts": ([1], [[0, 2, 3]], [-2]),
}


def expect(tokens, starts, paths, counts):
    """Move tokens of ``[B, 2, H, S, ...]``, one after another."""
    for slot, (start, path, count) in enumerate(zip(starts, paths, counts, strict=True)):
        for place, token in list(enumerate(path))[: max(count, 0)]:
            if start >= 0 and place < token and start + token < tokens.shape[3]:
                tokens[slot, :, :, start + place] = tokens[slot, :, :, start + token].copy()


def on_device(memory, stream, starts, paths, counts):
    table = np.random.default_rng(1).integers(-9, 99, (len(starts), 64)).astype(np.int32)
    for row, path in zip(table, paths, strict=True):
        row[: len(path)] = path
    return [memory.to_device(array, stream=stream) for array in (np.array(starts, np.int32), table, np.array(counts, np.int32))]


@pytest.mark.parametrize("name", list(PATHS))
@pytest.mark.parametrize(("heads", "d", "dtype"), [([2, 1, 3], 16, "float16"), ([1], 48, "int8"), ([5, 70], 64, "bfloat16")])
@LAYOUTS
def test_every_byte(memory, stream, layout, heads, d, dtype, name):
    starts, paths, counts = PATHS[name]
    counts = counts or list(map(len, paths))
    cache = [make_layer(memory, stream, layout, (len(starts) + 1, h, 12, d), dtype, index) for index, h in enumerate(heads)]
    infos = KVLayerInfos([layer.tensor for layer in cache], stream=stream)
    keep_kv_cache_paths_batched(infos, *on_device(memory, stream, starts, paths, counts), stream=stream)
    for layer in cache:
        expect(layer.slots, starts, paths, counts)
    check(cache)


@pytest.mark.parametrize("name", list(PATHS))
@LAYOUTS
def test_scales_by_token(memory, stream, layout, name):
    starts, paths, counts = PATHS[name]
    counts = counts or list(map(len, paths))
    cache = [make_layer(memory, stream, layout, (len(starts), h, 3, 4), "float32", h) for h in (2, 1)]  # rows of four scales
    infos = KVLayerInfos([layer.tensor for layer in cache], tokens_per_row=4, stream=stream)
    keep_kv_cache_paths_batched(infos, *on_device(memory, stream, starts, paths, counts), stream=stream)
    for layer in cache:
        slots = layer.slots
        tokens = np.lib.stride_tricks.as_strided(slots, (*slots.shape[:3], 12, 4), (*slots.strides[:3], 4, 1))
        expect(tokens, starts, paths, counts)
    check(cache)


def test_paths_of_64_tokens(memory, stream):
    random = np.random.default_rng(0)
    layer = make_layer(memory, stream, LAYOUTS.args[1][0], (3, 2, 130, 8), "float16", 0)
    paths = [list(range(64)), sorted(random.choice(64, 40, replace=False).tolist()), [0, 63]]
    starts, counts = [66, 3, 20], [64, 40, 2]
    infos = KVLayerInfos([layer.tensor], stream=stream)
    keep_kv_cache_paths_batched(infos, *on_device(memory, stream, starts, paths, counts), stream=stream)
    expect(layer.slots, starts, paths, counts)
    check([layer])


def test_numbers_are_not_changed(memory, stream):
    layer = make_layer(memory, stream, LAYOUTS.args[1][0], (2, 1, 12, 8), "float16", 0)
    numbers = on_device(memory, stream, *PATHS["some are left out"][:2], [4, 3])
    before = [tensor.numpy().tolist() for tensor in numbers]
    keep_kv_cache_paths_batched(KVLayerInfos([layer.tensor], stream=stream), *numbers, stream=stream)
    assert [tensor.numpy().tolist() for tensor in numbers] == before


WRONG = [
    ("starts", (3,), "int32", ShapeError, "dense tensor of shape (n,) with n <= 2"),
    ("starts", (2, 1), "int32", ShapeError, "dense tensor of shape (n,) with n <= 2"),
    ("starts", (2,), "int64", DTypeError, "int32"),
    ("paths", (2, 63), "int32", ShapeError, "dense tensor of shape (2, 64)"),
    ("paths", (1, 64), "int32", ShapeError, "dense tensor of shape (2, 64)"),
    ("paths", (2, 64), "int64", DTypeError, "int32"),
    ("counts", (1,), "int32", ShapeError, "dense tensor of shape (2,)"),
    ("counts", (2,), "int64", DTypeError, "int32"),
]


def fitting(memory, stream):
    layer = make_layer(memory, stream, LAYOUTS.args[1][0], (2, 1, 12, 8), "float16", 0)
    starts, paths, counts = on_device(memory, stream, [2, 5], [[0, 2], [0, 3]], [2, 2])
    infos = KVLayerInfos([layer.tensor], stream=stream)
    return layer, {"layer_infos": infos, "starts": starts, "paths": paths, "counts": counts, "stream": stream}


@pytest.mark.parametrize(("name", "shape", "dtype", "error", "expected"), WRONG)
def test_refused(memory, stream, name, shape, dtype, error, expected):
    layer, given = fitting(memory, stream)
    with raises(error, name, expected=expected):
        keep_kv_cache_paths_batched(**{**given, name: memory.to_device(np.zeros(shape, dtype), stream=stream)})
    check([layer])


@pytest.mark.parametrize("name", ["starts", "paths", "counts"])
def test_refused_places(memory, stream, name):
    layer, given = fitting(memory, stream)
    other = HostMemory()
    elsewhere = other.to_device(given[name].numpy(), stream=other.create_stream())
    with raises(PlaceError, name, expected="tensor of "):
        keep_kv_cache_paths_batched(**{**given, name: elsewhere})
    given[name].allocation.close()
    with pytest.raises(ClosedError, match=f"^{name}: its memory is closed"):
        keep_kv_cache_paths_batched(**given)
    check([layer])


def test_refused_layers(memory, stream):
    _, given = fitting(memory, stream)
    with raises(ShapeError, "layer_infos", expected="KVLayerInfos", got="int"):
        keep_kv_cache_paths_batched(**{**given, "layer_infos": 3})
    with pytest.raises(PlaceError, match=r"^stream: expected "):
        keep_kv_cache_paths_batched(**{**given, "stream": None})


def test_no_slots(memory, stream):
    layer, given = fitting(memory, stream)
    empty = dict(zip(("starts", "paths", "counts"), on_device(memory, stream, [], [], []), strict=True))
    keep_kv_cache_paths_batched(**{**given, **empty})
    check([layer])
