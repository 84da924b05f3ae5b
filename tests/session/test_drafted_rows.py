"""Buffers of a step that has drafts, a step ahead and the step in its place: an upload that has not run is not overwritten."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.helpers.recording import kv_config
from trt_kvcache import HostMemory, KVCacheManager
from trt_kvcache.engine.step_buffers import StepBuffers
from trt_kvcache.engine.step_rows import StepRows
from trt_kvcache.generation.device_sampler import Positions, sampling_row
from trt_kvcache.generation.sampling import SamplingParams
from trt_kvcache.kernels.sampling_rows import ROW_PARAMS
from trt_kvcache.session.chunks import Chunk
from trt_kvcache.session.drafted_rows import DraftedRow, DraftedRows
from trt_kvcache.session.hidden_states import HiddenStates


class LateMemory(HostMemory):
    """Uploads when it is waited for, as a busy GPU does."""

    def __init__(self) -> None:
        super().__init__()
        self.uploads: list[tuple[Any, Any]] = []

    def upload(self, destination: Any, source: Any, *, stream: Any) -> None:
        self.uploads.append((destination, source))

    def values(self) -> list[list[int]]:
        """Return what each upload reads now."""
        return [np.ravel(source).tolist() for _, source in self.uploads]


@pytest.fixture
def memory() -> LateMemory:
    return LateMemory()


def row(pending: int, asked: int, source: int, counter: int) -> DraftedRow:
    return DraftedRow(pending, asked, source, Positions(sampling_row(SamplingParams(temperature=0.5), 7, counter), counter, None, (0,)))


def rows_of(memory: HostMemory, slots: int = 3) -> DraftedRows:
    stream = memory.create_stream()
    starts = memory.to_device(np.arange(slots, dtype=np.int32), stream=stream)
    return DraftedRows(memory, starts=starts, stream=stream)


def test_rows_of_slots() -> None:
    memory = HostMemory()
    rows, stream = rows_of(memory), memory.create_stream()
    slots = rows.write([row(9, 3, 1, 20), None], stream=stream)
    assert [tensor.numpy().tolist() for tensor in (slots.asked, slots.sources, slots.starts)] == [[3, -1], [1, 0], [0, 1]]
    assert slots.pending.numpy()[0] == 9
    params = slots.params.numpy().view(ROW_PARAMS)[:, 0]
    assert (params["counter"][0], params["seed"][0]) == (20, 7)
    ahead = rows.write_ahead([(5, 2), None], stream=stream)
    assert [tensor.numpy().tolist() for tensor in (ahead.asked, ahead.sources)] == [[5, -1], [2, 0]]
    assert ahead.pending.numpy()[0] == 9, "which the device has changed"
    rows.close()


def test_uploads_of_rows_that_have_not_run(memory: LateMemory) -> None:
    rows, stream = rows_of(memory), memory.create_stream()
    rows.write([row(9, 3, 1, 20)], stream=stream)
    rows.write_ahead([(5, 2)], stream=stream)
    before = memory.values()
    rows.write([row(8, 4, 0, 30)], stream=stream)
    assert memory.values()[: len(before)] == before


def test_uploads_of_wanted_logits_that_have_not_run(memory: LateMemory) -> None:
    buffers = StepBuffers(
        memory, max_batch_size=2, max_width=8, vocab_size=5, index_dtypes=("int32", "int32"), logits_dtype="float32", max_logits_per_slot=8
    )
    stream = memory.create_stream()
    for width in (4, 8, 2):
        buffers.want_every_logit(2, width, stream=stream)
    assert memory.values() == [[*range(width)] * 2 for width in (4, 8, 2)]
    buffers.last_from_device(2)
    buffers.want_every_logit(2, 2, stream=stream)
    assert len(memory.uploads) == 4, "a kernel has written others"
    buffers.close()


def test_uploads_of_places_that_have_not_run(memory: LateMemory) -> None:
    with KVCacheManager(kv_config(slots=3), memory=memory) as cache:
        stream = memory.create_stream()
        states = HiddenStates(StepRows(memory, max_tokens=12, width=2, dtype="float32"), cache)
        starts = memory.to_device(np.zeros(3, np.int32), stream=stream)
        for mapping in ([0, 1, 2], [-1, 0, 1]):
            states.compact(mapping)
            states.store_from(starts, Chunk(0, (1, 1)), stream=stream)
            states.store_from(starts, Chunk(0, (1, 1)), stream=stream)
        assert memory.values() == [[0, 1, 2], [1, 2, 0]]
        states.close()
