"""Hidden states in the memory of the cache: those of the tokens in each slot, and those that a draft head reads in its next enqueue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.cache.cache import Cache
from trt_kvcache.engine.step_rows import StepRows
from trt_kvcache.kernels.draft_kernels import copy_slot_rows_kernel
from trt_kvcache.kernels.draft_tree_kernels import gather_parents_kernel
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.session.chunks import Chunk

#: Row to copy to, row to copy from, and number of rows.
Moves = list[tuple[int, int, int]]


class HiddenStates:
    """Rows by slot and position. As in the cache, rows past the length of a slot are never read. Copies are stream-ordered."""

    def __init__(self, rows: StepRows, cache: Cache) -> None:
        _, width = rows.shape
        self._step = rows
        self._positions = cache.lengths.max_sequence_length
        # Slots move by name: no row is copied in a compaction.
        #: By slot, where its rows are in the table.
        self.places = list(range(cache.max_batch_size))
        shape, dtype, slots = (cache.max_batch_size * self._positions, width), rows.table.dtype, (cache.max_batch_size,)
        stream = rows.memory.create_stream()
        with ExitStack() as undo:
            self._allocation = rows.memory.allocate(dense_nbytes(shape, dtype), zeroed=True, stream=stream)
            undo.callback(self._allocation.close)
            self._of_places = rows.memory.allocate(dense_nbytes(slots, "int32"), zeroed=True, stream=stream)
            undo.callback(self._of_places.close)
            self._staging = [rows.memory.staging(slots, "int32") for _ in range(2)]
            rows.memory.synchronize(stream)
            undo.pop_all()
        self._table = DeviceTensor(self._allocation, shape=shape, dtype=dtype)
        self._places_on_device = DeviceTensor(self._of_places, shape=slots, dtype="int32")
        self._uploaded: list[int] = []

    @classmethod
    def of(cls, rows: StepRows | None, cache: Cache) -> HiddenStates | None:
        """Return the hidden states of an engine; None for an engine without."""
        return None if rows is None else cls(rows, cache)

    def rows(self, slot: int, first: int, end: int) -> DeviceTensor:
        """Return the rows ``[end - first, width]`` of a slot from a position on, as a view."""
        start = self.places[slot] * self._positions
        return self._table[start + first : start + end]

    def store(self, starts: Sequence[int], chunk: Chunk, *, stream: Any) -> None:
        """Store the rows of the last enqueue, which began at ``starts``."""
        moves = [
            (self.places[slot] * self._positions + start, index * chunk.width, min(chunk.width, self._positions - start))
            for index, (slot, start) in enumerate(zip(_slots(chunk), starts, strict=True))
        ]
        self._step.memory.copy_rows(self._table, self._step.table, moves, stream=stream)

    @property
    def of_step(self) -> DeviceTensor:
        """Rows of the last enqueue."""
        return self._step.table

    def store_from(self, starts: DeviceTensor, chunk: Chunk, *, stream: Any) -> None:
        """Store the rows of the last enqueue, of the first slots, which began where only the device knows. All of them have room."""
        if self.places != self._uploaded:
            # Slots have moved since the last upload, which a step ahead that was dropped may still do. That before it is done.
            self._staging.reverse()
            self._staging[0][...] = self.places
            self._step.memory.upload(self._places_on_device, self._staging[0], stream=stream)
            self._uploaded = list(self.places)
        grid = chunk.count, chunk.width
        places, table = self._places_on_device, self._step.table
        copy_slot_rows_kernel(self._table, places, self._positions, starts, table, chunk.width, None, grid, stream)

    def keep_paths(self, starts: Sequence[int], paths: Sequence[Sequence[int]], *, stream: Any) -> None:
        """Move the rows at the indices ``paths`` after ``starts`` of each slot, in order, to directly after ``starts``."""
        moves = [
            (first + place, first + index, 1)
            for slot, (start, path) in enumerate(zip(starts, paths, strict=True))
            for first in (self.places[slot] * self._positions + start,)
            for place, index in enumerate(path)
            if place != index
        ]
        self._step.memory.copy_rows(self._table, self._table, moves, stream=stream)

    def copy(self, source: int, slot: int, length: int, *, stream: Any) -> None:
        """Copy the first rows of a slot to another one."""
        to, first = (self.places[place] * self._positions for place in (slot, source))
        self._step.memory.copy_rows(self._table, self._table, [(to, first, length)], stream=stream)

    def compact(self, mapping: Sequence[int]) -> None:
        """Move slots to their new places, -1 to drop."""
        kept = {new: self.places[slot] for slot, new in enumerate(mapping) if new >= 0}
        free = iter(sorted(set(self.places) - set(kept.values())))
        self.places = [kept[slot] if slot in kept else next(free) for slot in range(len(self.places))]

    def close(self) -> None:
        """Release the rows. Idempotent."""
        self._allocation.close()
        self._of_places.close()


class HiddenInputs:
    """Hidden states that a draft head reads beside its tokens: those of the large model where they are known, then its own.

    ``outputs``: hidden states that the head returns.
    """

    def __init__(self, inputs: StepRows, outputs: StepRows, cache: Cache) -> None:
        self._inputs, self._outputs = inputs, outputs
        # Rows of the large model by slot, from position 0 of the head on.
        self._of_model: dict[int, DeviceTensor] = {}
        shape, dtype = (cache.max_batch_size, outputs.shape[1]), outputs.table.dtype
        stream = outputs.memory.create_stream()
        self._allocation = outputs.memory.allocate(dense_nbytes(shape, dtype), zeroed=True, stream=stream)
        outputs.memory.synchronize(stream)
        # Of the tokens of trees in the next enqueue, by slot: row of the parent in the last enqueue of the slot, -1 for `_own`.
        self._parents: Mapping[int, Sequence[int]] = {}
        # First slot and width of the last enqueue.
        self._last = (0, 0)
        # Of each slot, the state after its last token, trees not counted.
        self._own = DeviceTensor(self._allocation, shape=shape, dtype=dtype)

    @property
    def dtype(self) -> str:
        """Dtype of the rows."""
        return self._own.dtype

    @classmethod
    def of(cls, inputs: StepRows | None, outputs: StepRows | None, cache: Cache) -> HiddenInputs | None:
        """Return the inputs of a draft head; None for other engines."""
        return None if inputs is None or outputs is None else cls(inputs, outputs, cache)

    def read_from(self, slot: int, states: DeviceTensor) -> None:
        """Have the token at each position p of a slot read ``states[p]``; after the last one, the state of the head itself."""
        self._of_model[slot] = states

    def continue_from(self, states: Mapping[int, DeviceTensor], *, stream: Any) -> None:
        """Have the next token of each slot read a row of the large model, ``[1, width]``, as if it were the state of the head itself."""
        for slot, state in states.items():
            self._copy(self._own, state, [(slot, 0, 1)], stream)

    def read_parents(self, parents: Mapping[int, Sequence[int]]) -> None:
        """Have each token of the trees of slots read the state of its parent, which the last enqueue has run at this row; -1 for the root.

        That is for the next enqueue, which leaves the states after the last tokens of the slots as they are; nothing for one of chains.
        """
        self._parents = parents

    def load_parents(self, trees: DeviceTensor, width: int, *, stream: Any) -> None:
        """Copy the rows of the next enqueue, of trees on the device (``GROWING_TREE``), ``width`` tokens from slot 0 on."""
        slots, count = len(trees), len(trees) * width
        gather_parents_kernel(trees, self._own[:slots], self._outputs.table[:count], self._inputs.table[:count], stream)

    def load(self, starts: Sequence[int], chunk: Chunk, *, stream: Any) -> None:
        """Copy the rows of the next enqueue, which begins at ``starts``. Rows of padding keep earlier ones."""
        own: Moves = []
        of_step: Moves = []
        first, width = self._last
        for index, (slot, start, take) in enumerate(zip(_slots(chunk), starts, chunk.takes, strict=True)):
            if not take:
                continue
            if slot in self._parents:
                for token, row in enumerate(self._parents[slot], start=index * chunk.width):
                    (own if row < 0 else of_step).append((token, slot if row < 0 else (slot - first) * width + row, 1))
            elif start < len(self._of_model.get(slot, ())):
                self._copy(self._inputs.table, self._of_model[slot], [(index * chunk.width, start, take)], stream)
            else:
                own.append((index * chunk.width, slot, 1))
        self._copy(self._inputs.table, self._own, _joined(own), stream)
        self._copy(self._inputs.table, self._outputs.table, of_step, stream)

    def keep(self, chunk: Chunk, *, stream: Any) -> None:
        """Keep the state after the last token of each slot of an enqueue."""
        last = [
            (slot, index * chunk.width + take - 1, 1)
            for index, (slot, take) in enumerate(zip(_slots(chunk), chunk.takes, strict=True))
            if take and slot not in self._parents
        ]
        self._last = chunk.first, chunk.width
        self._copy(self._own, self._outputs.table, _joined(last), stream)

    def load_rows(self, rows: DeviceTensor, moves: Moves, *, stream: Any) -> None:
        """Copy the rows of the next enqueue from those of the large model."""
        self._copy(self._inputs.table, rows, moves, stream)

    def keep_at(self, last: DeviceTensor, width: int, *, stream: Any) -> None:
        """Keep the state at index ``last`` of each of the first slots of an enqueue of this width."""
        grid = len(last), 1
        copy_slot_rows_kernel(self._own, None, 1, None, self._outputs.table, width, last, grid, stream)

    def load_own(self, count: int, *, stream: Any) -> None:
        """Copy the rows of the next enqueue, of one token in each of the first slots, from the states of the head itself."""
        self._copy(self._inputs.table, self._own, [(0, 0, count)], stream)

    def keep_own(self, count: int, *, stream: Any) -> None:
        """Keep the states of an enqueue of one token in each of the first slots."""
        self._copy(self._own, self._outputs.table, [(0, 0, count)], stream)

    def _copy(self, destination: DeviceTensor, source: DeviceTensor, moves: Moves, stream: Any) -> None:
        if moves:
            self._inputs.memory.copy_rows(destination, source, moves, stream=stream)

    def close(self) -> None:
        """Release the rows. Idempotent."""
        self._allocation.close()


def _slots(chunk: Chunk) -> range:
    return range(chunk.first, chunk.end)


def _joined(moves: Moves) -> Moves:
    """Return moves of single rows as one where both sides are contiguous: a step of one token in each slot."""
    (to, first, _), count = moves[0] if moves else (0, 0, 0), len(moves)
    return [(to, first, count)] if count > 1 and moves == [(to + index, first + index, 1) for index in range(count)] else moves


def downloaded(states: DeviceTensor) -> npt.NDArray[np.float32]:
    """Return rows of hidden states on the host, as float32. Waits for the device."""
    return states.numpy().astype(np.float32, copy=False)
