"""Compaction of every manager: which bytes move, and what the host knows afterwards. What is refused is in test_bad_inputs.py."""

from __future__ import annotations

import gc
import os
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from cache_cases import KINDS, CapturingMemory, Image, fill_all, kv_config, make_cache, mamba_config, state_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simt.standin import ALLOCATIONS, WAITS, StandIn, needs_standin

from trt_kvcache import KVCacheManager, KVLayout, Lengths, MambaCacheManager
from trt_kvcache.errors import CaptureError, LengthsUnknown

ALL_KINDS = pytest.mark.parametrize("kind", KINDS)
LAYOUTS = pytest.mark.parametrize("layout", list(KVLayout), ids=lambda layout: layout.value)
SHARED_MEMORY = settings(settings.default, suppress_health_check=[HealthCheck.function_scoped_fixture])

# lengths, mapping. A slot of seven tokens is full.
MAPPINGS = [
    ([3, 5, 0, 7], [0, -1, 1, 2]),
    ([3, 5, 0, 7], [-1, -1, -1, 0]),
    ([3, 5, 0, 7, 1], [-1, 0, 1, 2, 3]),
    ([3, 5], [-1, 0]),
    ([3, 5], [1, 0]),  # a cycle of two: the shorter one goes over the longer one
    ([3, 5, 2, 7, 1], [1, 2, 3, 4, 0]),  # a cycle of all
    ([3, 5, 2, 7, 1], [2, 4, 0, 3, 1]),  # two cycles, one that stays
    ([3, 5, 2, 7, 1], [2, -1, 0, 1, -1]),  # a cycle and a move
    ([3, 5, 2, 7, 1], [3, 2, -1, 1, 0]),  # a path that goes up: 1 -> 2, 3 -> 1, 0 -> 3, 4 -> 0
    ([0, 0, 4], [-1, 1, 0]),
    ([7, 7, 7, 7, 7], [-1, 3, 2, 1, 0]),
]


def on_device(memory: Any, values: Any, stream: Any) -> Any:
    return memory.to_device(np.array(values, np.int32), stream=stream)


def compact(cache: Any, lengths: Any, mapping: Any, stream: Any, *, seed: int = 0, device: bool = False) -> None:
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
        for seed, (lengths, mapping) in enumerate(MAPPINGS if dtype == "float16" else MAPPINGS[8:9]):
            compact(cache, lengths, np.array(mapping) if seed % 2 else mapping, stream, seed=seed)
        assert scales is None or cache.kv_scales.numpy().tobytes() == scales


@st.composite
def programs(draw: Any) -> tuple[str, KVLayout, list[int], list[int]]:
    old = draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(0, 7), min_size=old, max_size=old))
    survivors = draw(st.integers(0, old))
    mapping = [slot if slot < survivors else -1 for slot in draw(st.permutations(range(old)))]
    return draw(st.sampled_from(KINDS)), draw(st.sampled_from(KVLayout)), lengths, mapping


@SHARED_MEMORY
@given(programs())
def test_any_mapping_at_random(memory, program):
    kind, layout, lengths, mapping = program
    with make_cache(kind, memory, layout=layout) as cache:
        compact(cache, lengths, mapping, memory.create_stream())


def test_numbers_of_the_contract(memory, stream):
    with KVCacheManager(kv_config(max_sequence_length=16), memory=memory) as cache:
        cache.reset_for_new_sequences([11, 12, 13, 14], stream=stream)
        cache.compact_batch([-1, 0, -1, 1], 4, 2, stream=stream)
        assert (cache.kv_cache_lengths.numpy().tolist(), cache.host_kv_cache_lengths) == ([12, 14], (12, 14))


@pytest.mark.parametrize(("mapping", "after"), [([0, 1, 2], 3), ([0, 1, -1], 2), ([-1, -1, -1], 0), ([], 0)])
def test_identity_does_nothing(memory, stream, mapping, after):
    """Nor is there anything to do where the last slots go: none moves."""
    with make_cache("hybrid", memory) as cache:
        cache.reset_for_new_sequences([3, 5, 2][: len(mapping)], stream=stream)
        fill_all(cache, stream)
        followed = Mock(is_recurrent=False)
        cache.lengths.attach(followed)
        expected, device = Image(cache), cache.lengths.tensor.numpy().tolist()
        cache.compact_batch(mapping, len(mapping), after, stream=stream)
        expected.check(cache)
        assert (followed.method_calls, cache.lengths.tensor.numpy().tolist()) == ([], device)
        assert cache.host_kv_cache_lengths == (3, 5, 2)[:after]
        assert cache.kv_cache_lengths.shape == (after,)


@ALL_KINDS
def test_going_on_afterwards(memory, stream, kind):
    with make_cache(kind, memory) as cache:
        cache.reset_for_new_sequences([3, 5, 2], stream=stream)
        cache.compact_batch([-1, 1, 0], 3, 2, stream=stream)
        cache.commit_sequence_length([1, 2], stream=stream)
        fill_all(cache, stream)
        expected = Image(cache)
        expected.zero_states(2)
        cache.set_active_batch_size(3, stream=stream)
        assert (cache.host_kv_cache_lengths, cache.kv_cache_lengths.numpy().tolist()) == ((3, 7, 0), [3, 7, 0])
        expected.check(cache)


def test_where_the_host_knows_a_bound_that_many_tokens_move(memory, stream):
    with make_cache("manager", memory) as cache:
        cache.reset_for_new_sequences([1, 2, 3], stream=stream)
        cache.commit_sequence_length(on_device(memory, [0, 1, 2], stream), max_increment=2, stream=stream)
        fill_all(cache, stream)
        expected = Image(cache)
        expected.compact([-1, 1, 0], [3, 4, 5])
        cache.compact_batch([-1, 1, 0], 3, 2, stream=stream)
        expected.check(cache)
        assert cache.lengths.upper_bounds == (5, 4)
        with pytest.raises(LengthsUnknown, match=r"^the lengths of slots \[0, 1\] were changed by values that only the device has"):
            _ = cache.host_kv_cache_lengths
        cache.sync_lengths(stream=stream)
        assert cache.host_kv_cache_lengths == (5, 3)
        cache.clear_slot(1, stream=stream)
        cache.commit_sequence_length(on_device(memory, [1, 0], stream), max_increment=1, stream=stream)
        cache.clear_slot(0, stream=stream)
        cache.compact_batch([1, 0], 2, 2, stream=stream)
        with pytest.raises(LengthsUnknown, match=r"^the lengths of slots \[0\] were"):
            _ = cache.host_kv_cache_lengths


class TestDeviceMapping:
    @ALL_KINDS
    @LAYOUTS
    def test_does_what_the_same_mapping_on_the_host_does(self, memory, stream, kind, layout):
        with make_cache(kind, memory, layout=layout) as cache:
            for seed, (lengths, mapping) in enumerate([*MAPPINGS[:4], ([], [])]):
                compact(cache, lengths, mapping, stream, seed=seed, device=True)

    def test_leaves_the_host_with_bounds(self, memory, stream):
        with make_cache("manager", memory) as cache:
            cache.reset_for_new_sequences([3, 5, 0, 2], stream=stream)
            cache.compact_batch(on_device(memory, [0, -1, 1, 2], stream), 4, 3, stream=stream)
            # Slot 0 was 0 or 1, slot 1 was 1 or 2, slot 2 was 2 or 3.
            assert (cache.lengths.upper_bounds, cache.active_batch_size) == ((5, 5, 2), 3)
            cache.compact_batch(on_device(memory, [-1, -1, -1], stream), 3, 0, stream=stream)
            assert (cache.host_kv_cache_lengths, cache.kv_cache_lengths.shape) == ((), (0,))

    def test_is_read_only_where_the_switch_says_so(self, memory, stream, monkeypatch):
        with make_cache("hybrid", memory) as cache:
            cache.reset_for_new_sequences([3, 5, 2], stream=stream)
            monkeypatch.setenv("TRT_KVCACHE_DEBUG", "1")
            cache.compact_batch(on_device(memory, [-1, 0, 1], stream), 3, 2, stream=stream)
            assert cache.kv_cache_lengths.numpy().tolist() == [5, 2]
            monkeypatch.setenv("TRT_KVCACHE_DEBUG", "0")
            cache.compact_batch(on_device(memory, [1, 0], stream), 2, 2, stream=stream)

    def test_is_captured_and_leaves_the_host_alone(self):
        memory = CapturingMemory()
        stream = memory.create_stream()
        with make_cache("hybrid", memory) as cache:
            cache.reset_for_new_sequences([3, 5, 2], stream=stream)
            fill_all(cache, stream)
            expected, before = Image(cache), state_of(cache)
            expected.compact([-1, 0, 1], [3, 5, 2])
            mapping = on_device(memory, [-1, 0, 1], stream)
            memory.capturing = True
            cache.compact_batch(mapping, 3, 2, stream=stream)
            expected.check(cache)
            assert (state_of(cache)["mirror"], state_of(cache)["active"]) == (before["mirror"], before["active"])
            memory.capturing = False
            cache.lengths.replayed_compaction(3, 2)
            assert (cache.active_batch_size, cache.lengths.upper_bounds) == (2, (5, 5))
            assert cache.kv_cache_lengths.numpy().tolist() == [5, 2]


class TestSharedLengths:
    """Managers over one ``Lengths`` have their slots in common: what is done to the slots of one is done to those of all."""

    @pytest.mark.parametrize("asked", [0, 1])
    def test_managers_are_compacted_together(self, memory, stream, asked):
        lengths = Lengths(5, 7, memory=memory)
        kinds: Any = ((KVCacheManager, kv_config()), (MambaCacheManager, mamba_config()))
        caches = [kind(config, memory=memory, lengths=lengths) for kind, config in kinds]
        caches[0].reset_for_new_sequences([3, 5, 2], stream=stream)
        for cache in caches:
            fill_all(cache, stream)
        images = [Image(cache) for cache in caches]
        caches[asked].compact_batch([1, -1, 0], 3, 2, stream=stream)
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
        saved = None if kind == "mamba" else cache.capture_kv_cache(0, 2, stream=stream)
        cache.compact_batch(mapping, 3, 3, stream=stream)  # loads the kernels
        cache.sync_lengths(stream=stream)
        fill_all(cache, stream)
        expected = Image(cache)
        builder = stream.create_graph_builder().begin_building()
        cache.compact_batch(mapping, 3, 2, stream=builder)
        for call in (
            lambda: cache.compact_batch([-1, 0, 1], 3, 2, stream=builder),
            lambda: cache.reset_for_new_sequences([1], stream=builder),
            *([] if saved is None else [lambda: cache.restore_kv_cache(saved, 0, stream=builder)]),
        ):
            with pytest.raises(CaptureError):
                call()
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


@needs_standin
@ALL_KINDS
@pytest.mark.parametrize("where", ["host", "device"])
def test_neither_waits_nor_allocates_and_launches_once_per_group_and_kind(memory, stream, kind, where):
    with make_cache(kind, memory) as cache:
        mapping = [-1, 1, 0] if where == "host" else on_device(memory, [-1, 0, 1], stream)
        for run in range(2):  # the first one loads the kernels
            cache.reset_for_new_sequences([3, 5, 2], stream=stream)
            standin = StandIn()
            cache.compact_batch(mapping, 3, 2, stream=stream)
            calls = standin.take_calls()
            if run:
                assert not {*calls} & (WAITS | ALLOCATIONS)
                groups, kinds = {"manager": (2, 0), "linear": (1, 2), "mamba": (0, 2), "hybrid": (2, 2)}[kind]
                assert sum(call.startswith("cuLaunchKernel") for call in calls) == groups + kinds + 1
