"""Drafts that stay on the device, against the same steps in plain Python, on any memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from trt_kvcache.kernels.draft_kernels import (
    DraftedSlots,
    DrafterRows,
    accept_drafts_kernel,
    copy_slot_rows_kernel,
    feed_drafter_kernel,
    place_drafts_kernel,
)
from trt_kvcache.kernels.sampling_rows import ACTIVE, BAD_LOGITS, ROW_PARAMS, ROW_RESULT

#: Values that no kernel may leave where it writes.
STALE = 0x5A5A5A5A


@dataclass
class Slots:
    """Arrays of slots as lists; ``counters`` are those of ``ROW_PARAMS``, whose other fields are the number of the slot."""

    asked: list[int]
    sources: list[int]
    pending: list[int]
    counters: list[int]
    lengths: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def upload(self, memory, stream):
        count = len(self.asked)
        params = np.zeros(count, ROW_PARAMS)
        params["flags"], params["seed"], params["counter"] = ACTIVE, np.arange(count) + 7, self.counters
        numbers = (self.asked, self.sources, self.lengths or [STALE] * count, self.pending)
        numbers += (self.starts or [STALE] * count, self.counts or [STALE] * count)
        return DraftedSlots(
            *(memory.to_device(np.array(one, np.int32), stream=stream) for one in numbers),
            params=memory.to_device(params.view(np.uint8).reshape(count, -1), stream=stream),
        )


def results(tokens):
    """Return results of these tokens; a negative one is an error."""
    found = np.zeros(np.shape(tokens), ROW_RESULT)
    found["token"] = np.maximum(tokens, -1)
    found["error"] = np.where(np.array(tokens) < 0, BAD_LOGITS, 0)
    return found.view(np.uint8).reshape(*found.shape, -1)


def stale(memory, stream, *shape, dtype=np.int32):
    return memory.to_device(np.full(shape, STALE % 251, dtype), stream=stream)


def params_of(tensor):
    return tensor.numpy().view(ROW_PARAMS)[:, 0]


#: Tokens of each step of the drafter by its slots, then slots of the large model. Widths are those of the longest draft, or wider.
PLACED = {
    "drafts of different lengths, in other slots": ([[5, 6, 7], [8, 9, 10]], Slots([2, 1], [2, 0], [3, 4], [9, 20]), 3),
    "an idle slot, and one without a draft": ([[5, 6], [7, 8]], Slots([-1, 0, 2], [0, 0, 1], [3, 4, 5], [1, 2, 3]), 3),
    "a padded width": ([[5], [6]], Slots([2], [0], [3], [2**63]), 5),
    "an error in the middle": ([[5, 6], [-1, 7], [8, -1]], Slots([3, 3, 3], [0, 1, 0], [1, 2, 3], [0, 5, 0]), 4),
    "an error at the first token": ([[-1, 6], [4, 7]], Slots([2, 2], [0, 1], [1, 2], [0, 5]), 3),
    "an error after the draft": ([[5], [-1]], Slots([1], [0], [1], [7]), 2),
    "more rows than a block has threads": (
        [[*range(slot, slot + 40)] for slot in range(8)],
        Slots([slot % 10 - 1 if slot % 10 < 9 else 8 for slot in range(40)], [*range(39, -1, -1)], [*range(40)], [*range(40)]),
        9,
    ),
}


@pytest.mark.parametrize("name", PLACED)
def test_place_drafts(memory, stream, name):
    drafts, slots, width = PLACED[name]
    count = len(slots.asked)
    on_device = slots.upload(memory, stream)
    ids, rows = stale(memory, stream, count * width), stale(memory, stream, count * width + 2, 64, dtype=np.uint8)
    table = np.concatenate((results(drafts), np.full((2, len(drafts[0]), 16), 77, np.uint8)))  # steps that no draft has
    place_drafts_kernel(on_device, memory.to_device(table, stream=stream), ids, rows, width, stream)
    memory.synchronize(stream)
    found, params = ids.numpy().reshape(count, width).tolist(), params_of(rows)[: count * width].reshape(count, width)
    assert set(rows.numpy()[count * width :].ravel().tolist()) == {STALE % 251}
    for slot, (asked, source, pending, counter) in enumerate(zip(slots.asked, slots.sources, slots.pending, slots.counters, strict=True)):
        draft = [step[source] for step in drafts[: max(asked, 0)]]
        draft = draft[: next((place for place, token in enumerate(draft) if token < 0), len(draft))]
        expected = [] if asked < 0 else [pending, *draft]
        assert found[slot] == [*expected, *[0] * (width - len(expected))]
        assert on_device.lengths.numpy()[slot] == len(draft)
        assert params["flags"][slot].tolist() == [ACTIVE] * len(expected) + [0] * (width - len(expected))
        assert params["seed"][slot, : len(expected)].tolist() == [slot + 7] * len(expected)
        assert params["counter"][slot, : len(expected)].tolist() == [counter + place for place in range(len(expected))]
    assert on_device.pending.numpy().tolist() == slots.pending


#: Ids and chosen tokens of each slot, with its draft's length and start; the numbers of accepted tokens.
ACCEPTED = {
    "all": ([[1, 2, 3]], [[2, 3, 4]], [2], [10], [2]),
    "none": ([[1, 2, 3], [1, 9, 9]], [[5, 3, 4], [8, 9, 9]], [2, 2], [10, 0], [0, 0]),
    "some": ([[1, 2, 3, 4]], [[2, 3, 9, 7]], [3], [4], [2]),
    "equal again after another one": ([[1, 2, 3, 4]], [[2, 9, 4, 7]], [3], [4], [1]),
    "no more than the draft has": ([[1, 2, 0, 0]], [[2, 0, 0, 0]], [1], [4], [1]),
    "idle": ([[0, 0], [1, 2]], [[0, 0], [2, 5]], [-1, 1], [3, 6], [None, 1]),
    "no draft": ([[1, 0]], [[0, 0]], [0], [3], [0]),
    "an error at the last token": ([[1, 2, 3]], [[2, 3, -1]], [2], [3], [2]),
    "an error on the way": ([[1, 2, 0, 0]], [[2, -1, 0, 5]], [3], [3], [1]),
    "many slots": (
        [[slot, 1, 2, 3] for slot in range(300)],
        [[1, 2, 9, 4] if slot % 3 else [9, 2, 3, 4] for slot in range(300)],
        [slot % 5 - 1 for slot in range(300)],
        [*range(300)],
        [None if slot % 5 == 0 else 0 if slot % 3 == 0 else min(slot % 5 - 1, 2) for slot in range(300)],
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accept_drafts(memory, stream, name):
    ran, chosen, lengths, starts, accepted = ACCEPTED[name]
    count, width = len(ran), len(ran[0])
    counters = [2**63 + 5 * slot for slot in range(count)]
    slots = Slots(lengths, [0] * count, [99] * count, counters, [max(length, 0) for length in lengths], [*starts])
    on_device = slots.upload(memory, stream)
    ids = memory.to_device(np.array(ran, np.int32).reshape(-1), stream=stream)
    accept_drafts_kernel(on_device, ids, memory.to_device(results([*chosen, chosen[0]]).reshape(-1, 16), stream=stream), width, stream)
    memory.synchronize(stream)
    counts = [0 if one is None else one + 1 for one in accepted]
    assert on_device.counts.numpy().tolist() == counts
    assert on_device.starts.numpy().tolist() == [start + more for start, more in zip(starts, counts, strict=True)]
    assert params_of(on_device.params)["counter"].tolist() == [one + more for one, more in zip(counters, counts, strict=True)]
    assert on_device.pending.numpy().tolist() == [
        99 if more == 0 else max(row[more - 1], 0) for row, more in zip(chosen, counts, strict=True)
    ]


#: Chosen tokens and counts of the large model's slots, and their starts; targets, offsets and lengths of the drafter's.
FED = {
    "the same slots": ([[4, 5, 6], [7, 8, 9]], [2, 3], [12, 23], [0, 1], [1, 1], [50, 60]),
    "others between them": ([[4, 5, 6], [7, 8, 9]], [1, 2], [12, 23], [1, -1, 0], [-3, 9, 0], [50, 60, 70]),
    "an error": ([[4, -1, 6]], [2], [8], [0], [0], [50]),
    "an idle slot": ([[4, 5, 6], [7, 8, 9]], [0, 1], [12, 23], [-1, 1], [0, 1], [50, 60]),
}


@pytest.mark.parametrize("draft_width", [3, 7])
@pytest.mark.parametrize("name", FED)
def test_feed_drafter(memory, stream, name, draft_width):
    chosen, counts, starts, targets, offsets, lengths = FED[name]
    width, count = len(chosen[0]), len(targets)
    counters = [30 + slot for slot in range(len(chosen))]
    nothing = [0] * len(chosen)
    on_device = Slots(nothing, nothing, nothing, counters, nothing, starts, counts).upload(memory, stream)
    given = (memory.to_device(np.array(one, np.int32), stream=stream) for one in (targets, offsets, lengths))
    into = (stale(memory, stream, *shape) for shape in ((count * draft_width,), (count,), (count,), (count,)))
    rows = DrafterRows(*given, *into, params=stale(memory, stream, count, 64, dtype=np.uint8))
    feed_drafter_kernel(
        on_device, memory.to_device(results([*chosen, chosen[0]]).reshape(-1, 16), stream=stream), width, rows, draft_width, stream
    )
    memory.synchronize(stream)
    params = params_of(rows.params)
    for slot, target in enumerate(targets):
        taken = [] if target < 0 else [max(token, 0) for token in chosen[target][: counts[target]]]
        assert rows.ids.numpy().reshape(count, -1)[slot].tolist() == [*taken, *[0] * (draft_width - len(taken))]
        assert rows.takes.numpy()[slot] == len(taken)
        assert rows.last.numpy()[slot] == max(len(taken) - 1, 0)
        assert rows.starts.numpy()[slot] == (lengths[slot] if target < 0 else starts[target] - counts[target] + offsets[slot])
        assert (params["flags"][slot], params["counter"][slot]) == ((0, 0) if target < 0 else (ACTIVE, counters[target]))


@pytest.mark.parametrize(("dtype", "columns"), [("float32", 12), ("float16", 5), ("float32", 5000)])
@pytest.mark.parametrize("is_scattered", [True, False])
def test_copy_slot_rows(memory, stream, dtype, columns, is_scattered):
    """To places after the tokens of each slot, or from the last one of each."""
    generator = np.random.default_rng(5)
    source, into = (generator.standard_normal((count, columns)).astype(dtype) for count in (12, 30))
    numbers = [memory.to_device(np.array(one, np.int32), stream=stream) for one in ([2, 0, 1], [4, 1, 6], [3, 0, 2])]
    places, starts, last = numbers
    expected = into.copy()
    to, found = memory.to_device(into, stream=stream), memory.to_device(source, stream=stream)
    if is_scattered:
        copy_slot_rows_kernel(to, places, 10, starts, found, 4, None, (3, 3), stream)
        for slot, (place, start) in enumerate(zip([2, 0, 1], [4, 1, 6], strict=True)):
            expected[place * 10 + start :][:3] = source[slot * 4 :][:3]
    else:
        copy_slot_rows_kernel(to, None, 1, None, found, 4, last, (3, 1), stream)
        for slot, row in enumerate([3, 0, 2]):
            expected[slot] = source[slot * 4 + row]
    memory.synchronize(stream)
    assert to.numpy().tobytes() == expected.tobytes()
