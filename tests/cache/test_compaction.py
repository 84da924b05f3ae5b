"""Compaction of every manager: which bytes move, and what the host knows afterwards. What is refused is in test_bad_inputs.py."""

import gc
import os

import numpy as np
import pytest

from tests.helpers.cache_cases import ALL_KINDS, LAYOUTS, Image, fill_all, kv_config, make_cache, mamba_config, on_device
from trt_kvcache import KVCacheManager, Lengths, MambaCacheManager
from trt_kvcache.errors import CaptureError

# lengths, mapping. A slot of seven tokens is full.
MAPPINGS = [
    ([3, 5, 0, 7], [0, -1, 1, 2]),
    ([3, 5, 0, 7], [-1, -1, -1, 0]),
    ([3, 5, 0, 7, 1], [-1, 0, 1, 2, 3]),
    ([3, 5], [1, 0]),  # a cycle of two: the shorter one goes over the longer one
    ([3, 5, 2, 7, 1], [2, 4, 0, 3, 1]),  # two cycles, one that stays
    ([3, 5, 2, 7, 1], [3, 2, -1, 1, 0]),  # a path that goes up: 1 -> 2, 3 -> 1, 0 -> 3, 4 -> 0
]


def compact(cache, lengths, mapping, stream, *, seed=0, device=False):
    """Compact sequences of these lengths: every byte is then where it should be, and so are the lengths, which the host knows."""
    cache.reset_for_new_sequences(lengths, stream=stream)
    fill_all(cache, stream, seed)
    expected = Image(cache)
    expected.compact(mapping, lengths)
    after = [lengths[list(mapping).index(slot)] for slot in range(sum(new >= 0 for new in mapping))]
    given = on_device(cache.memory, mapping, stream) if device else mapping
    cache.compact_batch(given, len(mapping), len(after), stream=stream)
    expected.check(cache)
    assert cache.kv_cache_lengths.numpy().tolist() == after
    if device:
        cache.sync_lengths(stream=stream)
    assert cache.active_batch_size == len(after)
    assert cache.host_kv_cache_lengths == cache.lengths.upper_bounds == tuple(after)
    assert cache.kv_cache_all_empty is (not any(after))


@ALL_KINDS
@LAYOUTS
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn", "int8"])
def test_what_moves_and_what_stays(memory, stream, kind, layout, dtype):
    with make_cache(kind, memory, layout=layout, dtype=dtype) as cache:
        scales = None if kind == "mamba" or cache.kv_scales is None else cache.kv_scales.numpy().tobytes()
        for seed, (lengths, mapping) in enumerate(MAPPINGS if dtype == "float16" else MAPPINGS[-1:]):
            compact(cache, lengths, np.array(mapping) if seed % 2 else mapping, stream, seed=seed)
        assert scales is None or cache.kv_scales.numpy().tobytes() == scales


@ALL_KINDS
@LAYOUTS
def test_a_mapping_on_the_device_does_what_the_same_one_on_the_host_does(memory, stream, kind, layout):
    with make_cache(kind, memory, layout=layout) as cache:
        for seed, (lengths, mapping) in enumerate([*MAPPINGS[:3], ([], [])]):
            compact(cache, lengths, mapping, stream, seed=seed, device=True)


class TestSharedLengths:
    """Managers over one ``Lengths`` have their slots in common: what is done to the slots of one is done to those of all."""

    def test_managers_are_compacted_together(self, memory, stream):
        lengths = Lengths(5, 7, memory=memory)
        kinds = ((KVCacheManager, kv_config()), (MambaCacheManager, mamba_config()))
        caches = [kind(config, memory=memory, lengths=lengths) for kind, config in kinds]
        caches[0].reset_for_new_sequences([3, 5, 2], stream=stream)
        for cache in caches:
            fill_all(cache, stream)
        images = [Image(cache) for cache in caches]
        caches[1].compact_batch([1, -1, 0], 3, 2, stream=stream)
        assert lengths.host == (2, 3)
        for image, cache in zip(images, caches, strict=True):
            image.compact([1, -1, 0], [3, 5, 2])
            image.check(cache)
            cache.close()
        lengths.close()

    def test_one_that_is_closed_or_gone_is_left_out(self, memory, stream):
        lengths = Lengths(5, 7, memory=memory)
        closed, gone, stays = (MambaCacheManager(mamba_config(), memory=memory, lengths=lengths) for _ in range(3))
        closed.close()
        del gone
        gc.collect()
        stays.reset_for_new_sequences([0, 3], stream=stream)
        stays.compact_batch([1, 0], 2, 2, stream=stream)
        stays.set_active_batch_size(3, stream=stream)
        assert lengths.host == (3, 0, 0)
        stays.close()
        assert not lengths.is_recurrent
        lengths.close()


@pytest.mark.skipif(
    os.environ.get("TRT_KVCACHE_TEST_DEVICE", "host") == "host",
    reason="CUDA graphs: on the emulated device (tests/simt/run.py) and on a GPU",
)
@ALL_KINDS
def test_a_cuda_graph_replays_a_device_mapping(memory, stream, kind):
    with make_cache(kind, memory) as cache:
        mapping = on_device(memory, [0, 1, 2], stream)
        cache.reset_for_new_sequences([3, 5, 2], stream=stream)
        cache.compact_batch(mapping, 3, 3, stream=stream)  # loads the kernels
        cache.sync_lengths(stream=stream)
        fill_all(cache, stream)
        expected = Image(cache)
        builder = stream.create_graph_builder().begin_building()
        cache.compact_batch(mapping, 3, 2, stream=builder)
        with pytest.raises(CaptureError):
            cache.compact_batch([-1, 0, 1], 3, 2, stream=builder)
        graph = builder.end_building().complete()
        expected.check(cache)
        assert cache.host_kv_cache_lengths == (3, 5, 2)
        for lengths, slots in (([3, 5, 2], [-1, 0, 1]), ([7, 1, 4], [0, -1, 1]), ([2, 2, 6], [0, 1, -1])):
            cache.reset_for_new_sequences(lengths, stream=stream)
            fill_all(cache, stream, sum(lengths))
            memory.upload(mapping, np.array(slots, np.int32), stream=stream)
            memory.synchronize(stream)
            expected = Image(cache)
            expected.compact(slots, lengths)
            cache.lengths.replayed_compaction(3, 2)
            graph.launch(stream)
            expected.check(cache)
            cache.sync_lengths(stream=stream)
            assert cache.host_kv_cache_lengths == tuple(lengths[slots.index(slot)] for slot in range(2))
