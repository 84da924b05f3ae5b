"""Rows of states of any size: zero, copy, save, instantiate, compact. Every byte, on any memory."""

import numpy as np
import pytest

from trt_kvcache import DeviceTensor
from trt_kvcache.kernels import (
    MAX_SAVED_TENSORS,
    CompactionPlan,
    StateInfos,
    compact_rows,
    copy_rows,
    instantiate_rows,
    save_rows,
    zero_rows,
)

B = 4

# Bytes of a row, per layer; where the first row starts; bytes between rows.
STATES = {
    "multiples of 16": ([32, 256, 16], 256, 0),
    "one byte": ([1], 256, 0),
    "odd": ([7, 4099, 21], 256, 0),
    "even": ([2, 18, 4, 20, 24, 8], 256, 0),
    "rows at an odd place": ([32], 257, 0),
    "rows at an even place": ([32], 256, 0),
    "padded to an odd stride": ([16], 256, 5),
    "several blocks": ([16 * 1100, 1030], 256, 0),
}


class States:
    """States of some layers inside random bytes, and the bytes that are expected."""

    def __init__(self, memory, stream, name, seed):
        rows, start, gap = STATES[name]
        self.wholes, self.expected, self.rows, self.views = [], [], [], []
        for index, row in enumerate(rows):
            content = np.random.default_rng(seed + index).integers(0, 256, 2 * start + B * (row + gap), np.uint8)
            whole = memory.to_device(content, stream=stream)
            self.wholes.append(whole)
            self.expected.append(content)
            self.rows.append(np.ndarray((B, row), np.uint8, content, start, (row + gap, 1)))
            self.views.append(DeviceTensor(whole.allocation, shape=(B, row), dtype="uint8", strides=(row + gap, 1), offset=start))
        self.infos = StateInfos(self.views, stream=stream)
        #: The first row of each layer, as saved tensors.
        self.saved = [DeviceTensor(view.allocation, shape=view.shape[1:], dtype="uint8", offset=view.offset) for view in self.views]

    def take(self, slots, of, other):
        """Expect rows of others."""
        for into, rows in zip(self.rows, of.rows, strict=True):
            into[slots] = rows[other]

    def check(self):
        for whole, expected in zip(self.wholes, self.expected, strict=True):
            assert np.array_equal(whole.numpy(), expected)


@pytest.fixture(params=list(STATES))
def make(request, memory, stream):
    return lambda seed: States(memory, stream, request.param, seed)


@pytest.mark.parametrize(("slot", "count"), [(0, 1), (3, 1), (1, 2), (0, 4), (2, 0)])
def test_zero_and_copy(make, stream, slot, count):
    states, current, following, part = make(1), make(20), make(50), slice(slot, slot + count)
    zero_rows(states.infos, slot, count=count, stream=stream)
    for rows in states.rows:
        rows[part] = 0
    copy_rows(current.infos, following.infos, slot, count=count, stream=stream)
    current.take(part, following, part)
    for each in (states, current, following):
        each.check()


def test_save_and_instantiate(make, stream):
    states, saved = make(1), make(50)
    save_rows(states.infos, saved.saved, 2, stream=stream)
    saved.take(0, states, 2)
    saved.check()
    instantiate_rows(states.infos, saved.saved, 1, stream=stream)
    states.take(1, saved, 0)
    states.check()
    saved.check()


def test_sides_that_start_at_different_places(memory, stream):
    """The unit divides the addresses of both sides. (Any access works on a CPU: see the sanitizers in tests/simt.)"""
    even, odd = States(memory, stream, "rows at an even place", 1), States(memory, stream, "rows at an odd place", 2)
    copy_rows(even.infos, odd.infos, 1, stream=stream)
    even.take(1, odd, 1)
    save_rows(even.infos, odd.saved, 2, stream=stream)
    odd.take(0, even, 2)
    instantiate_rows(even.infos, odd.saved, 3, stream=stream)
    even.take(3, odd, 0)
    even.check()
    odd.check()


@pytest.mark.parametrize("mapping", [[-1, 0, 1, 2], [1, 2, 3, 0], [1, 0, -1, 2], [0, -1]])
def test_compact(make, stream, mapping):
    states = make(1)
    plan = CompactionPlan.from_host(mapping, len(mapping), sum(new >= 0 for new in mapping), [0] * len(mapping))
    compact_rows(states.infos, plan, stream=stream)  # whole rows, also of slots without a token
    kept = [old for old, new in enumerate(mapping) if new >= 0]
    states.take([mapping[old] for old in kept], states, kept)
    states.check()


def test_more_layers_than_a_launch_carries_and_a_slice_of_slots(memory, stream):
    content = np.random.default_rng(1).integers(1, 100, (2, MAX_SAVED_TENSORS + 2, 4, 3), np.int8)
    states = [memory.to_device(array, stream=stream) for array in content[0]]
    saved = [memory.to_device(array[0], stream=stream) for array in content[1]]
    infos = StateInfos([state[1:3] for state in states], stream=stream)
    save_rows(infos, saved, 1, stream=stream)
    assert [tensor.numpy().tolist() for tensor in saved] == content[0, :, 2].tolist()
    instantiate_rows(infos, saved, 0, stream=stream)
    zero_rows(infos, 1, stream=stream)
    content[0, :, 1], content[0, :, 2] = content[0, :, 2], 0
    assert [tensor.numpy().tolist() for tensor in states] == content[0].tolist()
