"""``SlotAdapters``: the numbers of the adapters of slots, in any memory."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from trt_kvcache.engine.slot_adapters import SlotAdapters

ADAPTERS = SimpleNamespace(names=("a", "b"), fingerprints={"a": "1", "b": "2"}, nbytes=lambda dtype: 7)


@pytest.fixture
def slots(memory):
    adapters = SlotAdapters(memory, ADAPTERS, max_slots=4, dtype="float16")
    yield adapters
    adapters.close()


def test_numbers_are_written_where_they_differ_from_the_last_ones(slots, memory, stream, monkeypatch):
    uploads, upload = [], memory.upload

    def count(*arguments, **options):
        uploads.append(arguments)
        upload(*arguments, **options)

    monkeypatch.setattr(memory, "upload", count)
    for names, numbers, total in (
        (("b", None, "a"), [2, 0, 1], 1),
        (("b", None, "a"), [2, 0, 1], 1),
        (("b", None), [2, 0, 1], 2),  # the third is not of the next enqueue
        ((None, None), [0, 0, 1], 3),
        (("a",) * 4, [1, 1, 1, 1], 4),
    ):
        slots.write(names, stream=stream)
        memory.synchronize(stream)
        found = np.zeros(4, np.int32)
        memory.download(found, slots.table, stream=stream)
        memory.synchronize(stream)
        assert found[: len(numbers)].tolist() == numbers
        assert (slots.in_use, len(uploads)) == (any(names), total)


def test_a_write_that_fails_is_not_taken_for_done(slots, memory, stream, monkeypatch):
    slots.write(["a"], stream=stream)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "upload", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            slots.write(["b"], stream=stream)
    slots.write(["a"], stream=stream)
    slots.write(["b"], stream=stream)
    found = np.zeros(4, np.int32)
    memory.download(found, slots.table, stream=stream)
    memory.synchronize(stream)
    assert found[0] == 2


def test_names_hashes_and_bytes(slots):
    assert (slots.names, slots.fingerprints, slots.updates_nbytes) == (("a", "b"), {"a": "1", "b": "2"}, 7)
