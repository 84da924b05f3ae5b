"""Save and instantiate K/V of a slot: every byte of both sides, on any memory."""

from __future__ import annotations

import os
import threading
import warnings
from typing import Any

import numpy as np
import pytest

from tests.kernels.layers import LAYOUTS, Layer, check, make_layer, make_saved, saved_tensor
from trt_kvcache import KVLayout
from trt_kvcache.kernels import (
    MAX_SAVED_TENSORS,
    KVLayerInfos,
    instantiate_kv_cache_batched,
    instantiate_kv_cache_layer_from_tensor,
    parallel_layers as host_layers,
    save_kv_cache_batched,
    save_kv_cache_layer_into_tensor,
)

# heads of each layer, B, S, D, dtype, tokens of the saved tensors, tokens to copy, slot
CASES = {
    "two bytes": ([2, 3, 1], 3, 7, 16, "float16", 5, 4, 1),
    "one byte": ([1, 2], 2, 5, 32, "float8_e4m3fn", 3, 3, 1),
    "four bytes": ([3], 4, 6, 12, "float32", 6, 6, 3),
    "one token": ([2, 1], 1, 9, 8, "bfloat16", 1, 1, 0),
    "no token": ([2, 1], 2, 9, 8, "bfloat16", 2, 0, 0),
    "no room": ([2], 2, 3, 8, "bfloat16", 0, 0, 1),
    "a whole slot": ([1, 4], 5, 11, 80, "int8", 11, 11, 4),
    "several blocks": ([1, 2], 2, 160, 128, "float16", 155, 155, 1),
}


def copies(memory: Any, stream: Any, layout: KVLayout, case: str) -> tuple[list[Layer], list[Layer], int, int]:
    heads, b, s, d, dtype, n, tokens, slot = CASES[case]
    cache = [make_layer(memory, stream, layout, (b, h, s, d), dtype, index) for index, h in enumerate(heads)]
    saved = [make_saved(memory, stream, (h, n, d), dtype, 50 + index) for index, h in enumerate(heads)]
    return cache, saved, tokens, slot


@pytest.mark.parametrize("batched", [True, False], ids=["batched", "single"])
@pytest.mark.parametrize("save", [True, False], ids=["save", "instantiate"])
@pytest.mark.parametrize("case", list(CASES))
@LAYOUTS
def test_every_byte(memory, stream, layout, case, save, batched):
    cache, saved, tokens, slot = copies(memory, stream, layout, case)
    tensors = [saved_tensor(layer) for layer in saved]
    if batched:
        infos = KVLayerInfos([layer.tensor for layer in cache], stream=stream), KVLayerInfos(tensors, stream=stream)
        if save:
            save_kv_cache_batched(*infos, slot, tokens, stream=stream)
        else:
            instantiate_kv_cache_batched(*infos, slot, tokens, stream=stream)
    else:
        tokens = tensors[0].shape[2]  # the single-layer variants copy what the tensor holds
        for layer, tensor in zip(cache, tensors, strict=True):
            if save:
                save_kv_cache_layer_into_tensor(tensor, layer.tensor, slot, stream=stream)
            else:
                instantiate_kv_cache_layer_from_tensor(layer.tensor, tensor, slot, stream=stream)
    for layer, other in zip(cache, saved, strict=True):
        into, of = (other.slots[0], layer.slots[slot]) if save else (layer.slots[slot], other.slots[0])
        into[:, :, :tokens] = of[:, :, :tokens]
    check(cache + saved)


@pytest.mark.parametrize("layers", [MAX_SAVED_TENSORS - 1, MAX_SAVED_TENSORS, MAX_SAVED_TENSORS + 1, 2 * MAX_SAVED_TENSORS + 3])
def test_more_layers_than_a_launch_carries(memory, stream, layers):
    cache = [make_layer(memory, stream, KVLayout.SEPARATE, (2, 1 + index % 2, 3, 8), "float16", index) for index in range(layers)]
    saved = [make_saved(memory, stream, (1 + index % 2, 2, 8), "float16", 500 + index) for index in range(layers)]
    infos = KVLayerInfos([layer.tensor for layer in cache], stream=stream)
    tensors = KVLayerInfos([saved_tensor(layer) for layer in saved], stream=stream)
    save_kv_cache_batched(infos, tensors, 1, 2, stream=stream)
    instantiate_kv_cache_batched(infos, tensors, 0, 2, stream=stream)
    for layer, other in zip(cache, saved, strict=True):
        other.slots[0] = layer.slots[1, :, :, :2]
        layer.slots[0, :, :, :2] = other.slots[0]
    check(cache + saved)


@pytest.mark.parametrize(("layers", "b", "s", "h", "d"), [(3, 8, 1024, 4, 128), (3, 4, 512, 7, 64), (28, 1, 1024, 4, 128)])
def test_sizes_of_models(memory, stream, layers, b, s, h, d):
    cache = [make_layer(memory, stream, KVLayout.COMBINED, (b, h, s, d), "float16", index) for index in range(layers)]
    infos = KVLayerInfos([layer.tensor for layer in cache], stream=stream)
    for n in (1, 47, 96, 97, 128, 255):
        saved = [make_saved(memory, stream, (h, n, d), "float16", 50 + index) for index in range(layers)]
        tensors = KVLayerInfos([saved_tensor(layer) for layer in saved], stream=stream)
        save_kv_cache_batched(infos, tensors, b - 1, n, stream=stream)
        instantiate_kv_cache_batched(infos, tensors, 0, n, stream=stream)
        for layer, other in zip(cache, saved, strict=True):
            other.slots[0] = layer.slots[b - 1, :, :, :n]
            layer.slots[0, :, :, :n] = other.slots[0]
        check(saved)
    check(cache)


def test_a_view_that_starts_at_a_slot(memory, stream):
    layer = make_layer(memory, stream, KVLayout.SEPARATE, (4, 2, 5, 8), "float16", 1)
    saved = make_saved(memory, stream, (2, 3, 8), "float16", 2)
    infos = KVLayerInfos([layer.tensor[1:3]], stream=stream)
    instantiate_kv_cache_batched(infos, KVLayerInfos([saved_tensor(saved)], stream=stream), 1, 3, stream=stream)
    layer.slots[2, :, :, :3] = saved.slots[0]
    check([layer, saved])


def test_values(memory, stream):
    """Bytes as numbers, through the views that users see."""
    shape = (2, 2, 1, 3, 4)
    values = np.arange(48, dtype=np.float32).reshape(shape)
    cache = memory.to_device(values, stream=stream)
    saved = memory.to_device(np.zeros((2, 1, 2, 4), np.float32), stream=stream)
    save_kv_cache_layer_into_tensor(saved, cache, 1, stream=stream)
    assert saved.numpy().tolist() == [[[[24, 25, 26, 27], [28, 29, 30, 31]]], [[[36, 37, 38, 39], [40, 41, 42, 43]]]]


def test_large_copies_are_done_by_threads_that_have_ended(monkeypatch):
    monkeypatch.setattr(host_layers, "_MIN_PARALLEL_NBYTES", 1)
    done = []
    host_layers.for_each_layer(lambda layer: done.append((layer, threading.current_thread().name)), range(9), 1)
    assert sorted(layer for layer, _ in done) == list(range(9))
    assert all(name.startswith("trt_kvcache") for _, name in done)
    if hasattr(os, "fork"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, which is what is tried
            child = os.fork()
        if not child:
            host_layers.for_each_layer(done.append, range(9), 1)
            os._exit(len(done) - 18)
        assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(ZeroDivisionError):
        host_layers.for_each_layer(lambda layer: done.append(1 // layer), [2, 0, 3], 1)
    assert len(done) == 11
