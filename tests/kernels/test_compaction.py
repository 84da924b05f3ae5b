"""Compaction of K/V, states and lengths in place: every byte, on any memory, by the host's plan and by a device mapping."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.layers import LAYOUTS, Layer, check, make_layer
from trt_kvcache import KVLayout
from trt_kvcache.kernels import CompactionPlan, KVLayerInfos, StateInfos, compact_kv_cache_batched, compact_length_tensor, compact_rows


def apply(slots: Any, mapping: list[int], tokens: list[int] | None = None) -> None:
    """Move the first tokens of the slots, or all of them, as if a copy were at hand."""
    before = slots.copy()
    for old, new in enumerate(mapping):
        if new >= 0:
            part = (new,) if tokens is None else (new, slice(None), slice(None), slice(0, tokens[old]))
            slots[part] = before[(old, *part[1:])]


def make_cache(memory: Any, stream: Any, layout: KVLayout, heads: list[int], b: int, s: int, d: int, dtype: str) -> list[Layer]:
    return [make_layer(memory, stream, layout, (b, h, s, d), dtype, index) for index, h in enumerate(heads)]


def infos_of(cache: list[Layer], stream: Any) -> KVLayerInfos:
    return KVLayerInfos([layer.tensor for layer in cache], stream=stream)


# mapping, tokens of each old slot; S = 7
MAPPINGS = {
    "evict the first": ([-1, 0, 1, 2], [3, 7, 1, 5]),
    "evict two": ([0, -1, 1, -1, 2], [7, 2, 6, 7, 4]),
    "swap": ([1, 0], [7, 3]),
    "a cycle of three": ([2, 0, 1], [1, 7, 4]),
    "a cycle, a path and one that stays": ([4, 1, 0, -1, 3, 2], [5, 6, 2, 7, 4, 1]),
    "two cycles": ([1, 0, 3, 2], [0, 7, 7, 6]),
    "up and down": ([1, -1, 0], [7, 7, 2]),
    "empty slots": ([-1, 1, 0], [0, 0, 0]),
    "a single survivor": ([-1, -1, 0], [1, 2, 7]),
    "nobody survives": ([-1, -1], [3, 4]),
    "nobody is there": ([], []),
    "all stay": ([0, 1, -1], [3, 7, 2]),
}


@pytest.mark.parametrize("name", list(MAPPINGS))
@pytest.mark.parametrize(("heads", "d", "dtype"), [([2, 1, 3], 16, "float16"), ([1], 48, "int8"), ([3, 2], 4, "float32")])
@LAYOUTS
def test_every_byte(memory, stream, layout, heads, d, dtype, name):
    mapping, tokens = MAPPINGS[name]
    cache = make_cache(memory, stream, layout, heads, len(mapping) + 1, 7, d, dtype)
    plan = CompactionPlan.from_host(mapping, len(mapping), sum(new >= 0 for new in mapping), tokens)
    compact_kv_cache_batched(infos_of(cache, stream), plan, stream=stream)
    for layer in cache:
        apply(layer.slots, mapping, tokens)
    check(cache)


@pytest.mark.parametrize("b", range(1, 6))
@LAYOUTS
def test_random_mappings(memory, stream, layout, b):
    random = np.random.default_rng(b)
    cache = make_cache(memory, stream, layout, [1, 3], b, 5, 24, "bfloat16")
    infos = infos_of(cache, stream)
    states = memory.to_device(random.integers(0, 256, (b, 3, 7), np.uint8), stream=stream)
    rows, state_infos = states.numpy(), StateInfos([states], stream=stream)
    for _ in range(12):
        old = int(random.integers(1, b + 1))
        new = int(random.integers(0, old + 1))
        mapping = np.where((order := random.permutation(old)) < new, order, -1).tolist()
        tokens = random.integers(0, 6, old).tolist()
        lengths = memory.to_device(np.array(tokens, np.int32), stream=stream)
        plan = CompactionPlan.from_host(mapping, old, new, tokens)
        compact_kv_cache_batched(infos, plan, stream=stream)
        compact_rows(state_infos, plan, stream=stream)
        compact_length_tensor(lengths, plan, stream=stream)
        for layer in cache:
            apply(layer.slots, mapping, tokens)
        apply(rows, mapping)
        assert lengths.numpy()[:new].tolist() == [tokens[mapping.index(slot)] for slot in range(new)]
    check(cache)
    assert np.array_equal(states.numpy(), rows)


@pytest.mark.parametrize("kind", ["a cycle", "pairs", "shuffled", "evict the first"])
def test_more_slots_than_a_launch_carries(memory, stream, kind):
    b = 130
    random = np.random.default_rng(9)
    mapping = {
        "a cycle": [*range(1, b), 0],
        "pairs": [slot ^ 1 for slot in range(b)],
        "shuffled": [slot if slot < 101 else -1 for slot in random.permutation(b).tolist()],
        "evict the first": [-1, *range(b - 1)],
    }[kind]
    tokens = random.integers(0, 4, b).tolist()
    new = sum(slot >= 0 for slot in mapping)
    cache = make_cache(memory, stream, KVLayout.SEPARATE, [2], b, 3, 8, "float16")
    states = memory.to_device(random.integers(0, 256, (b, 4), np.uint8), stream=stream)
    lengths = memory.to_device(np.array(tokens, np.int32), stream=stream)
    rows, numbers = states.numpy(), lengths.numpy()
    plan = CompactionPlan.from_host(mapping, b, new, tokens)
    compact_kv_cache_batched(infos_of(cache, stream), plan, stream=stream)
    compact_rows(StateInfos([states], stream=stream), plan, stream=stream)
    compact_length_tensor(lengths, plan, stream=stream)
    apply(cache[0].slots, mapping, tokens)
    apply(rows, mapping)
    apply(numbers, mapping)
    check(cache)
    assert np.array_equal(states.numpy(), rows)
    assert np.array_equal(lengths.numpy(), numbers)


@pytest.mark.parametrize("d", [8, 264])
def test_long_slots_in_several_blocks(memory, stream, d):
    mapping, tokens = [1, 2, 0, -1, 3], [200, 131, 7, 200, 199]
    cache = make_cache(memory, stream, KVLayout.COMBINED, [1, 2], 5, 200, d, "float16")
    compact_kv_cache_batched(infos_of(cache, stream), CompactionPlan.from_host(mapping, 5, 4, tokens), stream=stream)
    for layer in cache:
        apply(layer.slots, mapping, tokens)
    check(cache)


def test_layers_of_other_lengths(memory, stream):
    """Each layer has its own S: strides come from the layer, not from the group."""
    cache = [make_layer(memory, stream, layout, (3, h, s, 8), "float16", s) for layout, h, s in zip(KVLayout, (2, 1), (9, 4), strict=True)]
    compact_kv_cache_batched(infos_of(cache, stream), CompactionPlan.from_host([-1, 0, 1], 3, 2, [4, 3, 4]), stream=stream)
    for layer in cache:
        apply(layer.slots, [-1, 0, 1], [4, 3, 4])
    check(cache)


class TestMappingOnTheDevice:
    @pytest.fixture
    def compact(self, memory, stream):
        """Compact everything by a device mapping; return the cache, states, lengths, and what they were."""

        def run(mapping: list[int], tokens: list[int], new: int, layout: KVLayout = KVLayout.SEPARATE) -> Any:
            cache = make_cache(memory, stream, layout, [2, 1], len(mapping) + 1, 7, 16, "float16")
            content = np.random.default_rng(3).integers(0, 256, (len(mapping) + 1, 5), np.uint8)
            states, lengths, on_device = (
                memory.to_device(array, stream=stream) for array in (content, np.array(tokens, np.int32), np.array(mapping, np.int32))
            )
            plan = CompactionPlan.from_device(on_device, len(mapping), new, lengths)
            compact_kv_cache_batched(infos_of(cache, stream), plan, stream=stream)
            compact_rows(StateInfos([states], stream=stream), plan, stream=stream)
            compact_length_tensor(lengths, plan, stream=stream)
            return cache, (states, content), (lengths, np.array(tokens, np.int32))

        return run

    @pytest.mark.parametrize(
        "name", ["evict the first", "evict two", "a single survivor", "nobody survives", "nobody is there", "all stay"]
    )
    @LAYOUTS
    def test_every_byte(self, compact, layout, name):
        mapping, tokens = MAPPINGS[name]
        cache, (states, rows), (lengths, numbers) = compact(mapping, tokens, sum(new >= 0 for new in mapping), layout)
        for layer in cache:
            apply(layer.slots, mapping, tokens)
        apply(rows, mapping)
        apply(numbers, mapping)
        check(cache)
        assert np.array_equal(states.numpy(), rows)
        assert np.array_equal(lengths.numpy(), numbers)

    def test_many_slots(self, compact):
        random = np.random.default_rng(4)
        kept = random.random(600) < 0.7
        mapping = np.where(kept, np.cumsum(kept) - 1, -1).tolist()
        tokens = random.integers(0, 8, 600).tolist()
        cache, (states, rows), (lengths, numbers) = compact(mapping, tokens, int(kept.sum()))
        for layer in cache:
            apply(layer.slots, mapping, tokens)
        apply(rows, mapping)
        apply(numbers, mapping)
        check(cache)
        assert np.array_equal(states.numpy(), rows)
        assert np.array_equal(lengths.numpy(), numbers)

    def test_what_does_not_keep_the_order_moves_nothing(self, compact):
        """The host cannot check the mapping; nothing outside the slots is written, and no slot is read too late."""
        mapping, tokens = [2, 9, 0, -7, 1], [7, 7, 3, 7, 5]
        cache, (states, rows), (lengths, numbers) = compact(mapping, tokens, 3)
        kept = [-1, -1, 0, -1, 1]
        for layer in cache:
            apply(layer.slots, kept, tokens)
        apply(rows, kept)
        apply(numbers, kept)
        check(cache)
        assert np.array_equal(states.numpy(), rows)
        assert np.array_equal(lengths.numpy(), numbers)

    def test_lengths_outside_a_slot_stay_inside(self, compact):
        cache, _, _ = compact([-1, 0, 1], [7, 1000, -3], 2)
        for layer in cache:
            apply(layer.slots, [-1, 0, -1], [7, 7, 0])
        check(cache)


def test_lengths_beyond_the_plan_stay(memory, stream):
    lengths = memory.to_device(np.array([11, 12, 13, 14, 15], np.int32), stream=stream)
    compact_length_tensor(lengths, CompactionPlan.from_host([-1, 0, -1, 1], 4, 2, [11, 12, 13, 14]), stream=stream)
    assert lengths.numpy().tolist() == [12, 14, 13, 14, 15]
