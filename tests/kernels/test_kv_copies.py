"""Save and instantiate K/V of a slot: every byte of both sides, on any memory."""

import os
import threading
import warnings

import pytest

from tests.kernels.layers import LAYOUTS, check, make_layer, make_saved, saved_tensor
from trt_kvcache import KVLayout
from trt_kvcache.kernels import (
    MAX_SAVED_TENSORS,
    KVLayerInfos,
    instantiate_kv_cache_batched,
    instantiate_kv_cache_layer_from_tensor,
    save_kv_cache_batched,
    save_kv_cache_layer_into_tensor,
)
from trt_kvcache.kernels.host import layers as host_layers

# heads of each layer, B, S, D, dtype, tokens of the saved tensors, tokens to copy, slot
CASES = {
    "two bytes": ([2, 3, 1], 3, 7, 16, "float16", 5, 4, 1),
    "one byte": ([1, 2], 2, 5, 32, "float8_e4m3fn", 3, 3, 1),
    "four bytes": ([3], 4, 6, 12, "float32", 6, 6, 3),
    "no token": ([2, 1], 2, 9, 8, "bfloat16", 2, 0, 0),
    "several blocks": ([1, 2], 2, 160, 128, "float16", 155, 155, 1),
}


@pytest.mark.parametrize("batched", [True, False], ids=["batched", "single"])
@pytest.mark.parametrize("save", [True, False], ids=["save", "instantiate"])
@pytest.mark.parametrize("case", list(CASES))
@LAYOUTS
def test_every_byte(memory, stream, layout, case, save, batched):
    heads, b, s, d, dtype, n, tokens, slot = CASES[case]
    cache = [make_layer(memory, stream, layout, (b, h, s, d), dtype, index) for index, h in enumerate(heads)]
    saved = [make_saved(memory, stream, (h, n, d), dtype, 50 + index) for index, h in enumerate(heads)]
    tensors = [saved_tensor(layer) for layer in saved]
    if batched:
        infos = KVLayerInfos([layer.tensor for layer in cache], stream=stream), KVLayerInfos(tensors, stream=stream)
        (save_kv_cache_batched if save else instantiate_kv_cache_batched)(*infos, slot, tokens, stream=stream)
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
