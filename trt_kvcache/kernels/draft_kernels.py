"""Drafts that stay on the device: rows that verify them, accepted tokens, and the first rows of the next draft."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from trt_kvcache.kernels.host_arrays import Array, array_of
from trt_kvcache.kernels.kernel import Kernel
from trt_kvcache.kernels.launch import THREADS_PER_BLOCK, address, blocks_for, launch
from trt_kvcache.kernels.sampling_rows import NO_ERROR, ROW_PARAMS, ROW_RESULT
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.shapes import ROW_GRANULE, dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor


class DraftedSlots(NamedTuple):
    """Slots of the large model whose drafts are verified: one element of each tensor for each slot, int32 unless it says otherwise."""

    #: Tokens of the draft, -1 for an idle slot; and the slot of the drafter that has generated it.
    asked: DeviceTensor
    sources: DeviceTensor
    #: Tokens of the draft before its first error.
    lengths: DeviceTensor
    #: Token before the draft.
    pending: DeviceTensor
    #: Tokens in the cache.
    starts: DeviceTensor
    #: Accepted tokens of the last draft, and 1; 0 for an idle slot.
    counts: DeviceTensor
    #: uint8 ``[slots, 64]``: ``ROW_PARAMS`` of the token after the pending one.
    params: DeviceTensor

    @property
    def memory(self) -> Memory:
        """Memory of all tensors."""
        return self.asked.memory


class DrafterRows(NamedTuple):
    """Rows of the drafter in its next enqueue: one element of each tensor for each of its slots, int32 unless it says otherwise."""

    #: Slot of the large model that it drafts for, -1 for none; and its first row, less the tokens in the cache of that slot.
    targets: DeviceTensor
    offsets: DeviceTensor
    #: Tokens in the cache of the drafter.
    lengths: DeviceTensor
    #: Token ids, ``width`` for each slot.
    ids: DeviceTensor
    #: Positions of the first rows.
    starts: DeviceTensor
    #: Tokens to run, and the index of the last one, or 0.
    takes: DeviceTensor
    last: DeviceTensor
    #: uint8 ``[slots, 64]``: ``ROW_PARAMS`` of the first token of the draft.
    params: DeviceTensor


# --- NumPy, for host memory ---


def _results(tensor: DeviceTensor) -> Array:
    return array_of(tensor).view(ROW_RESULT)[..., 0]


def _params(tensor: DeviceTensor) -> Array:
    return array_of(tensor).view(ROW_PARAMS)[:, 0]


def _place_drafts_on_host(
    slots: DraftedSlots, drafts: DeviceTensor, ids: DeviceTensor, rows: DeviceTensor, width: int, stream: Any
) -> None:
    found = _results(drafts)
    asked, sources, lengths, pending = map(array_of, (slots.asked, slots.sources, slots.lengths, slots.pending))
    into, params, of_rows = array_of(ids).reshape(-1, width), _params(slots.params), _params(rows)[: ids.shape[0]].reshape(-1, width)
    into[...], of_rows[...] = 0, np.zeros((), ROW_PARAMS)
    for slot, count in enumerate(asked.tolist()):
        draft = found[: max(count, 0), sources[slot]]
        errors = np.flatnonzero(draft["error"] != NO_ERROR)
        length = lengths[slot] = errors[0] if errors.size else len(draft)
        if count >= 0:
            into[slot, : length + 1] = [pending[slot], *draft["token"][:length]]
            of_rows[slot, : length + 1] = params[slot]
            of_rows["counter"][slot, : length + 1] += np.arange(length + 1, dtype=np.uint64)


def _accept_drafts_on_host(slots: DraftedSlots, ids: DeviceTensor, chosen: DeviceTensor, width: int, stream: Any) -> None:
    asked, lengths, pending, starts, counts = map(array_of, (slots.asked, slots.lengths, slots.pending, slots.starts, slots.counts))
    ran, params = array_of(ids).reshape(-1, width), _params(slots.params)
    found = _results(chosen)[: ids.shape[0]].reshape(-1, width)
    counts[...] = 0
    for slot in np.flatnonzero(asked >= 0).tolist():
        draft, own = ran[slot, 1 : lengths[slot] + 1], found[slot, : lengths[slot]]
        others = np.flatnonzero(own["token"] != draft)  # that of an error is -1
        equal = int(others[0]) if others.size else len(draft)
        counts[slot] = equal + 1
        starts[slot] += equal + 1
        pending[slot] = max(found["token"][slot, equal], 0)
        params["counter"][slot] += np.uint64(equal + 1)


def _feed_drafter_on_host(slots: DraftedSlots, chosen: DeviceTensor, width: int, rows: DrafterRows, draft_width: int, stream: Any) -> None:
    counts, starts, params = array_of(slots.counts), array_of(slots.starts), _params(slots.params)
    tokens = _results(chosen)[: len(counts) * width]["token"].reshape(-1, width)
    targets, offsets, lengths, ids, first, takes, last = map(array_of, rows[:7])
    of_rows, ids = _params(rows.params), ids.reshape(-1, draft_width)
    ids[...] = 0
    for slot, target in enumerate(targets.tolist()):
        takes[slot] = count = 0 if target < 0 else counts[target]
        ids[slot, :count] = np.maximum(tokens[target, :count], 0)
        first[slot] = lengths[slot] if target < 0 else starts[target] - count + offsets[slot]
        last[slot] = max(count - 1, 0)
        of_rows[slot] = np.zeros((), ROW_PARAMS) if target < 0 else params[target]


def _copy_slot_rows_on_host(
    to: DeviceTensor,
    places: DeviceTensor | None,
    to_stride: int,
    to_offsets: DeviceTensor | None,
    source: DeviceTensor,
    from_stride: int,
    from_offsets: DeviceTensor | None,
    grid: tuple[int, int],
    stream: Any,
) -> None:
    slots, rows = grid
    own = np.arange(slots)
    to_rows = (own if places is None else array_of(places)[:slots]) * to_stride + _first_of(to_offsets, slots)
    from_rows = own * from_stride + _first_of(from_offsets, slots)
    into, found = array_of(to), array_of(source)
    for row in range(rows):
        into[to_rows + row] = found[from_rows + row]


def _first_of(offsets: DeviceTensor | None, slots: int) -> Any:
    return 0 if offsets is None else array_of(offsets)[:slots]


# --- CUDA: launches of plugins/drafts.cu ---


def _launch(memory: Memory, name: str, threads: int, arguments: tuple[int, ...], stream: Any) -> None:
    launch(memory, "drafts", name, (-(-threads // THREADS_PER_BLOCK), 1, 1), arguments, stream)


def _place_drafts_on_device(
    slots: DraftedSlots, drafts: DeviceTensor, ids: DeviceTensor, rows: DeviceTensor, width: int, stream: Any
) -> None:
    count = len(slots.asked)
    own = (slots.asked, slots.sources, slots.pending, slots.params, slots.lengths, ids, rows)
    arguments = (drafts.ptr, drafts.shape[1], *(tensor.ptr for tensor in own), count, width)
    _launch(slots.memory, "place_drafts", count * width, arguments, stream)


def _accept_drafts_on_device(slots: DraftedSlots, ids: DeviceTensor, chosen: DeviceTensor, width: int, stream: Any) -> None:
    count = len(slots.asked)
    own = (slots.asked, slots.lengths, slots.starts, slots.counts, slots.pending, slots.params)
    _launch(slots.memory, "accept_drafts", count, (ids.ptr, chosen.ptr, width, *(tensor.ptr for tensor in own), count), stream)


def _feed_drafter_on_device(
    slots: DraftedSlots, chosen: DeviceTensor, width: int, rows: DrafterRows, draft_width: int, stream: Any
) -> None:
    count = len(rows.targets)
    tensors = (slots.counts, slots.starts, slots.params, *rows)
    arguments = (chosen.ptr, width, *(tensor.ptr for tensor in tensors), count, draft_width)
    _launch(slots.memory, "feed_drafter", count * draft_width, arguments, stream)


def _copy_slot_rows_on_device(
    to: DeviceTensor,
    places: DeviceTensor | None,
    to_stride: int,
    to_offsets: DeviceTensor | None,
    source: DeviceTensor,
    from_stride: int,
    from_offsets: DeviceTensor | None,
    grid: tuple[int, int],
    stream: Any,
) -> None:
    slots, rows = grid
    row = dense_nbytes(to.shape[1:], to.dtype)
    arguments = (
        *(to.ptr, address(places), to_stride, address(to_offsets)),
        *(source.ptr, from_stride, address(from_offsets), row),
    )
    launch(to.memory, "drafts", "copy_slot_rows", (blocks_for(-(-row // ROW_GRANULE), slots * rows), rows, slots), arguments, stream)


# --- without checks, for sessions ---


#: Write the rows that verify ``drafts``, ``ROW_RESULT`` ``[steps, slots of the drafter, 16]``: ids ``[slots * width]`` and their
#: ``ROW_PARAMS``.
place_drafts_kernel = Kernel(_place_drafts_on_host, _place_drafts_on_device)

#: Count the accepted tokens of drafts by the ids that ran and the results of the sampler at each row, and go on after them.
accept_drafts_kernel = Kernel(_accept_drafts_on_host, _accept_drafts_on_device)

#: Write the rows of the drafter that run the tokens that were chosen last.
feed_drafter_kernel = Kernel(_feed_drafter_on_host, _feed_drafter_on_device)

#: Copy rows of each slot to places that the device knows: see ``plugins/drafts.cu``. ``grid``: slots, and rows of each.
copy_slot_rows_kernel = Kernel(_copy_slot_rows_on_host, _copy_slot_rows_on_device)
