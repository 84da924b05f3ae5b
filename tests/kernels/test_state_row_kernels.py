"""Rows of states of any size: zero, copy, save, instantiate, compact. Every byte, on any memory."""

from __future__ import annotations

from typing import Any

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
    "even": ([2, 18], 256, 0),
    "four": ([4, 20], 256, 0),
    "eight": ([24, 8], 256, 0),
    "rows at an odd place": ([32], 257, 0),
    "rows at an even place": ([32], 256, 0),
    "padded rows": ([16, 32], 256, 16),
    "padded to an odd stride": ([16], 256, 5),
    "several blocks": ([16 * 1100, 1030], 256, 0),
}


class States:
    """States of some layers inside random bytes, and the bytes that are expected."""

    def __init__(self, memory: Any, stream: Any, name: str, seed: int, b: int = B) -> None:
        rows, start, gap = STATES[name]
        self.wholes, self.expected, self.rows, self.views = [], [], [], []
        for index, row in enumerate(rows):
            content = np.random.default_rng(seed + index).integers(0, 256, 2 * start + b * (row + gap), np.uint8)
            whole = memory.to_device(content, stream=stream)
            self.wholes.append(whole)
            self.expected.append(content)
            self.rows.append(np.ndarray((b, row), np.uint8, content, start, (row + gap, 1)))
            self.views.append(DeviceTensor(whole.allocation, shape=(b, row), dtype="uint8", strides=(row + gap, 1), offset=start))
        self.infos = StateInfos(self.views, stream=stream)

    def saved(self) -> list[DeviceTensor]:
        """The first row of each layer, as saved tensors."""
        return [DeviceTensor(view.allocation, shape=view.shape[1:], dtype="uint8", offset=view.offset) for view in self.views]

    def check(self) -> None:
        for whole, expected in zip(self.wholes, self.expected, strict=True):
            assert np.array_equal(whole.numpy(), expected)


@pytest.fixture(params=list(STATES))
def make(request, memory, stream):
    return lambda seed: States(memory, stream, request.param, seed)


@pytest.mark.parametrize(("slot", "count"), [(0, 1), (3, 1), (1, 2), (0, 4), (2, 0)])
def test_zero(make, stream, slot, count):
    states = make(1)
    zero_rows(states.infos, slot, count=count, stream=stream)
    for rows in states.rows:
        rows[slot : slot + count] = 0
    states.check()


@pytest.mark.parametrize(("slot", "count"), [(0, 1), (1, 3), (3, 0)])
def test_copy(make, stream, slot, count):
    current, following = make(1), make(50)
    copy_rows(current.infos, following.infos, slot, count=count, stream=stream)
    for into, of in zip(current.rows, following.rows, strict=True):
        into[slot : slot + count] = of[slot : slot + count]
    current.check()
    following.check()


def test_save_and_instantiate(make, stream):
    states, saved = make(1), make(50)
    save_rows(states.infos, saved.saved(), 2, stream=stream)
    for into, of in zip(saved.rows, states.rows, strict=True):
        into[0] = of[2]
    saved.check()
    instantiate_rows(states.infos, saved.saved(), 1, stream=stream)
    for into, of in zip(states.rows, saved.rows, strict=True):
        into[1] = of[0]
    states.check()
    saved.check()


def test_sides_that_start_at_different_places(memory, stream):
    """The unit divides the addresses of both sides. (Any access works on a CPU: see the sanitizers in tests/simt.)"""
    even, odd = States(memory, stream, "rows at an even place", 1), States(memory, stream, "rows at an odd place", 2)
    copy_rows(even.infos, odd.infos, 1, stream=stream)
    even.rows[0][1] = odd.rows[0][1]
    save_rows(even.infos, odd.saved(), 2, stream=stream)
    odd.rows[0][0] = even.rows[0][2]
    instantiate_rows(even.infos, odd.saved(), 3, stream=stream)
    even.rows[0][3] = odd.rows[0][0]
    even.check()
    odd.check()


@pytest.mark.parametrize("mapping", [[-1, 0, 1, 2], [1, 2, 3, 0], [1, 0, -1, 2], [0, -1]])
def test_compact(make, stream, mapping):
    states = make(1)
    plan = CompactionPlan.from_host(mapping, len(mapping), sum(new >= 0 for new in mapping), [0] * len(mapping))
    compact_rows(states.infos, plan, stream=stream)  # whole rows, also of slots without a token
    for rows in states.rows:
        before = rows.copy()
        for old, new in enumerate(mapping):
            if new >= 0:
                rows[new] = before[old]
    states.check()


def test_more_layers_than_a_launch_carries(memory, stream):
    layers = MAX_SAVED_TENSORS + 2
    content = np.random.default_rng(1).integers(0, 100, (2, layers, 2, 3), np.int8)
    states = [memory.to_device(array, stream=stream) for array in content[0]]
    saved = [memory.to_device(array[0], stream=stream) for array in content[1]]
    infos = StateInfos(states, stream=stream)
    save_rows(infos, saved, 1, stream=stream)
    assert [tensor.numpy().tolist() for tensor in saved] == content[0, :, 1].tolist()
    instantiate_rows(infos, saved, 0, stream=stream)
    assert [tensor.numpy()[0].tolist() for tensor in states] == content[0, :, 1].tolist()


def test_a_slice_of_slots(memory, stream):
    content = np.arange(40, dtype=np.float32).reshape(5, 2, 4)
    states = memory.to_device(content, stream=stream)
    zero_rows(StateInfos([states[2:4]], stream=stream), 1, stream=stream)
    content[3] = 0
    assert np.array_equal(states.numpy(), content)
