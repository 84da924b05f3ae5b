"""``HiddenStates``: the hidden states of the tokens in each slot, downloaded after each step, or uploaded before one of an MTP head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.cache.cache import Cache
from trt_kvcache.engine.step_rows import StepRows
from trt_kvcache.session.chunks import Chunk

Float32 = npt.NDArray[np.float32]


class HiddenStates:
    """float32 rows by slot and position in host memory, of rows of any dtype. As in the cache, none past a slot's length is read."""

    def __init__(self, rows: StepRows, cache: Cache) -> None:
        _, hidden_size = rows.shape
        self._step = rows
        # Pages of zeros take no memory before they are written.
        self._table = np.zeros((cache.max_batch_size, cache.lengths.max_sequence_length, hidden_size), np.float32)
        self._staging = rows.memory.staging(rows.shape, rows.dtype)

    @classmethod
    def of(cls, rows: StepRows | None, cache: Cache) -> HiddenStates | None:
        """Return the hidden states of an engine; None for an engine without."""
        return None if rows is None else cls(rows, cache)

    def __getitem__(self, slot: int) -> Float32:
        """Return the rows ``[S, hidden]`` of a slot, to read or to write."""
        found: Float32 = self._table[slot]
        return found

    def download(self, starts: Sequence[int], chunk: Chunk, *, stream: Any) -> None:
        """Store the rows of the last enqueue, which began at ``starts``. Waits for it."""
        source = self._step.of_step(chunk.count, chunk.width)
        found = self._staged(chunk)
        self._step.memory.download(found, source, stream=stream)
        self._step.memory.synchronize(stream)
        for slot, start, rows in zip(range(chunk.first, chunk.end), starts, found, strict=True):
            stored = self._table[slot, start : start + chunk.width]
            stored[...] = rows[: len(stored)]

    def upload(self, starts: Sequence[int], chunk: Chunk, *, stream: Any) -> None:
        """Hand the rows from ``starts`` on to the next enqueue. Stream-ordered."""
        staged = self._staged(chunk)
        for slot, start, rows in zip(range(chunk.first, chunk.end), starts, staged, strict=True):
            stored = self._table[slot, start : start + chunk.width]
            rows[: len(stored)] = stored
        self._step.memory.upload(self._step.of_step(chunk.count, chunk.width), staged, stream=stream)

    def copy(self, source: int, slot: int, length: int) -> None:
        """Copy the first rows of a slot to another one."""
        self._table[slot, :length] = self._table[source, :length]

    def compact(self, mapping: Sequence[int], lengths: Sequence[int]) -> None:
        """Move the rows of slots of these lengths to their new places, -1 to drop."""
        moves = [(new, self._table[slot, : lengths[slot]].copy()) for slot, new in enumerate(mapping) if new not in (-1, slot)]
        for new, rows in moves:
            self._table[new, : len(rows)] = rows

    def _staged(self, chunk: Chunk) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = self._staging[: chunk.count * chunk.width].reshape(chunk.count, chunk.width, -1)
        return found
