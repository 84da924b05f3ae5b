"""``DraftedRows``: the slots whose drafts are verified, in the memory of the cache, for kernels that assemble their rows there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from trt_kvcache.generation.device_sampler import Positions
from trt_kvcache.kernels.draft_kernels import DraftedSlots
from trt_kvcache.kernels.sampling_rows import ROW_PARAMS
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor

#: Staging pages: of a step, of a step ahead that is dropped, and of the step in its place.
_PAGES = 3


class DraftedRow(NamedTuple):
    """A slot with a pending token, and the tokens of its draft, which may be none."""

    pending: int
    #: Tokens of the draft, and the slot of the drafter that has generated it.
    asked: int
    source: int
    positions: Positions


#: Arrays of :class:`DraftedSlots`, those first that are uploaded.
_NUMBERS = ("asked", "sources", "pending", "lengths", "counts")
_UPLOADED, _UPLOADED_AHEAD = 3, 2


class DraftedRows:
    """Device arrays of all slots, allocated once; each upload has a page of pinned memory.

    ``starts``: positions of the first rows, which an engine reads.
    """

    def __init__(self, memory: Memory, *, starts: DeviceTensor, stream: Any) -> None:
        max_slots = len(starts)
        self._memory, self._starts, self._max_slots = memory, starts, max_slots
        count, params = len(_NUMBERS) * max_slots, (max_slots, ROW_PARAMS.itemsize)
        self._allocations = [
            memory.allocate(dense_nbytes(shape, dtype), zeroed=True, stream=stream)
            for shape, dtype in (((count,), "int32"), (params, "uint8"))
        ]
        self._numbers = DeviceTensor(self._allocations[0], shape=(count,), dtype="int32")
        self._params = DeviceTensor(self._allocations[1], shape=params, dtype="uint8")
        self._pages = [(memory.staging((_UPLOADED * max_slots,), "int32"), memory.staging(params, "uint8")) for _ in range(_PAGES)]
        self._views: dict[int, DraftedSlots] = {}

    def write(self, rows: Sequence[DraftedRow | None], *, stream: Any) -> DraftedSlots:
        """Upload the rows of slots from slot 0 on, None for an idle one, and return their arrays."""
        numbers, params = self._next_page()
        asked, sources, pending = numbers.reshape(_UPLOADED, -1)
        of_rows = params.view(ROW_PARAMS)[:, 0]
        for slot, row in enumerate(rows):
            asked[slot] = -1
            if row is not None:
                asked[slot], sources[slot], pending[slot] = row.asked, row.source, row.pending
                of_rows[slot] = row.positions.row
                of_rows["counter"][slot] = np.uint64(row.positions.counter)
        self._memory.upload(self._numbers[: len(numbers)], numbers, stream=stream)
        self._memory.upload(self._params, params, stream=stream)
        return self.slots(len(rows))

    def write_ahead(self, drafts: Sequence[tuple[int, int] | None], *, stream: Any) -> DraftedSlots:
        """Upload the tokens of a draft and the slot of the drafter for each slot, None for an idle one; the device has the rest."""
        numbers, _ = self._next_page()
        asked, sources, _ = numbers.reshape(_UPLOADED, -1)
        for slot, draft in enumerate(drafts):
            asked[slot], sources[slot] = (-1, 0) if draft is None else draft
        end = _UPLOADED_AHEAD * self._max_slots
        self._memory.upload(self._numbers[:end], numbers[:end], stream=stream)
        return self.slots(len(drafts))

    def _next_page(self) -> tuple[Any, Any]:
        self._pages = [*self._pages[1:], self._pages[0]]
        return self._pages[-1]

    def slots(self, count: int) -> DraftedSlots:
        """Return the arrays of the first slots."""
        views = self._views.get(count)
        if views is None:
            starts = range(0, len(self._numbers), self._max_slots)
            numbers = {name: self._numbers[first : first + count] for name, first in zip(_NUMBERS, starts, strict=True)}
            views = self._views[count] = DraftedSlots(**numbers, starts=self._starts[:count], params=self._params[:count])
        return views

    def close(self) -> None:
        """Release the memory. Idempotent."""
        for allocation in self._allocations:
            allocation.close()
