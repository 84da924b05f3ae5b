"""Compaction of K/V, states and lengths in place: every byte, on any memory, by the host's plan and by a device mapping."""

import numpy as np
import pytest

from tests.kernels.layers import LAYOUTS, check, make_layer
from trt_kvcache import KVLayout
from trt_kvcache.kernels import CompactionPlan, KVLayerInfos, StateInfos, compact_kv_cache_batched, compact_length_tensor, compact_rows


def apply(slots, mapping, tokens=None):
    """Move the first tokens of the slots, or all of them, as if a copy were at hand."""
    before = slots.copy()
    for old, new in enumerate(mapping):
        if new >= 0:
            part = (new,) if tokens is None else (new, slice(None), slice(None), slice(0, tokens[old]))
            slots[part] = before[(old, *part[1:])]


class Scene:
    """Layers, states and lengths of some slots, full of random bytes, and what their bytes should be."""

    def __init__(self, memory, stream, tokens, heads, s, d, dtype, layout):
        b = len(tokens) + 1
        self.stream, self.memory = stream, memory
        self.layers = [make_layer(memory, stream, layout, (b, h, s, d), dtype, index) for index, h in enumerate(heads)]
        self.rows = np.random.default_rng(3).integers(0, 256, (b, 3, 7), np.uint8)
        self.states = memory.to_device(self.rows, stream=stream)
        self.numbers = np.array([*tokens, 77], np.int32)  # of one more slot, which stays
        self.lengths = memory.to_device(self.numbers, stream=stream)
        self.infos = KVLayerInfos([layer.tensor for layer in self.layers], stream=stream)
        self.state_infos = StateInfos([self.states], stream=stream)

    def compact(self, mapping, new=None, *, on_device=False):
        old, new = len(mapping), sum(slot >= 0 for slot in mapping) if new is None else new
        if on_device:
            tensor = self.memory.to_device(np.array(mapping, np.int32), stream=self.stream)
            plan = CompactionPlan.from_device(tensor, old, new, self.lengths[:old])
        else:
            plan = CompactionPlan.from_host(mapping, old, new, self.numbers[:old].tolist())
        compact_kv_cache_batched(self.infos, plan, stream=self.stream)
        compact_rows(self.state_infos, plan, stream=self.stream)
        compact_length_tensor(self.lengths, plan, stream=self.stream)

    def check(self, mapping, tokens):
        for layer in self.layers:
            apply(layer.slots, mapping, tokens)
        apply(self.rows, mapping)
        apply(self.numbers, mapping)
        check(self.layers)
        assert np.array_equal(self.states.numpy(), self.rows)
        assert np.array_equal(self.lengths.numpy(), self.numbers)


# mapping, tokens of each old slot; S = 7
MAPPINGS = {
    "evict the first": ([-1, 0, 1, 2], [3, 7, 1, 5]),
    "swap": ([1, 0], [7, 3]),
    "a cycle of three": ([2, 0, 1], [1, 7, 4]),
    "a cycle, a path and one that stays": ([4, 1, 0, -1, 3, 2], [5, 6, 2, 7, 4, 1]),
    "empty slots": ([-1, 1, 0], [0, 0, 0]),
    "nobody survives": ([-1, -1], [3, 4]),
    "all stay": ([0, 1, -1], [3, 7, 2]),
}


def keeps_order(mapping):
    kept = [new for new in mapping if new >= 0]
    return kept == sorted(kept)


@pytest.mark.parametrize(
    ("name", "on_device"),
    [(name, on_device) for name in MAPPINGS for on_device in (False, True) if not on_device or keeps_order(MAPPINGS[name][0])],
)
@pytest.mark.parametrize(("heads", "d", "dtype"), [([2, 1, 3], 16, "float16"), ([1], 48, "int8"), ([3, 2], 4, "float32")])
@LAYOUTS
def test_every_byte(memory, stream, layout, heads, d, dtype, name, on_device):
    mapping, tokens = MAPPINGS[name]
    scene = Scene(memory, stream, tokens, heads, 7, d, dtype, layout)
    scene.compact(mapping, on_device=on_device)
    scene.check(mapping, tokens)


def test_long_slots_in_several_blocks(memory, stream):
    mapping, tokens = [1, 2, 0, -1, 3], [200, 131, 7, 200, 199]
    scene = Scene(memory, stream, tokens, [1, 2], 200, 264, "float16", KVLayout.COMBINED)
    scene.compact(mapping)
    scene.check(mapping, tokens)


@pytest.mark.parametrize("b", range(1, 6))
@LAYOUTS
def test_random_mappings_one_after_the_other(memory, stream, layout, b):
    random = np.random.default_rng(b)
    scene = Scene(memory, stream, random.integers(0, 6, b).tolist(), [1, 3], 5, 24, "bfloat16", layout)
    for _ in range(12):
        old = int(random.integers(1, b + 1))
        order = random.permutation(old)
        mapping = np.where(order < random.integers(0, old + 1), order, -1).tolist()
        tokens = scene.numbers[:old].tolist()
        scene.compact(mapping)
        scene.check(mapping, tokens)


@pytest.mark.parametrize("kind", ["a cycle", "evict the first", "on the device"])
def test_more_slots_than_a_launch_carries(memory, stream, kind):
    on_device = kind == "on the device"
    b, random = 600 if on_device else 130, np.random.default_rng(9)
    kept = random.random(b) < 0.7
    mapping = {
        "a cycle": [*range(1, b), 0],
        "evict the first": [-1, *range(b - 1)],
        "on the device": np.where(kept, np.cumsum(kept) - 1, -1).tolist(),
    }[kind]
    tokens = random.integers(0, 4, b).tolist()
    scene = Scene(memory, stream, tokens, [2], 3, 8, "float16", KVLayout.SEPARATE)
    scene.compact(mapping, on_device=on_device)
    scene.check(mapping, tokens)


def test_what_the_host_cannot_check(memory, stream):
    """A device mapping that does not keep the order moves nothing; nor is anything written or read outside the slots."""
    scene = Scene(memory, stream, [7, 7, 3, 7, 5], [2, 1], 7, 16, "float16", KVLayout.SEPARATE)
    scene.compact([2, 9, 0, -7, 1], 3, on_device=True)
    scene.check([-1, -1, 0, -1, 1], [7, 7, 3, 7, 5])
    scene = Scene(memory, stream, [7, 1000, -3], [2, 1], 7, 16, "float16", KVLayout.SEPARATE)
    scene.compact([-1, 0, 1], 2, on_device=True)
    for layer in scene.layers:
        apply(layer.slots, [-1, 0, -1], [7, 7, 0])
    check(scene.layers)
