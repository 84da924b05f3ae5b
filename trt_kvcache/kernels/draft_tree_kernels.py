"""Trees of draft tokens that grow on the device, a level after each enqueue of a draft model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from trt_kvcache.dtypes import itemsize
from trt_kvcache.kernels.growing_trees import GROWING_TREE, Successors, frontier, grow
from trt_kvcache.kernels.host_arrays import Array, array_of
from trt_kvcache.kernels.kernel import Kernel
from trt_kvcache.kernels.launch import address, blocks_for, launch
from trt_kvcache.kernels.sampling_rows import LOGPROBS, NO_ERROR, ROW_PARAMS, ROW_RESULT, SamplingRows
from trt_kvcache.memory.shapes import ROW_GRANULE
from trt_kvcache.memory.tensor import DeviceTensor

#: Threads of a block of ``grow_trees``.
TREE_THREADS = 256


@dataclass(frozen=True, eq=False)
class TreeInputs:
    """Inputs of the next enqueue, of s tokens of each slot, and rows of the choices after it. The tokens of a tree come first."""

    #: int32 ``[A * s]``: token ids; 0 after the last token of a tree.
    ids: DeviceTensor
    #: int64 ``[A * s]``: the ancestors of each token and itself, as bits.
    ancestors: DeviceTensor
    #: int32 ``[A * s]``: the number of ancestors; None where an engine does not read it.
    depths: DeviceTensor | None
    #: uint8 ``[A * s, 64]``: ``ROW_PARAMS``, active where the next level begins.
    params: DeviceTensor


# --- NumPy, for host memory ---


def _grow_trees_on_host(
    trees: DeviceTensor, found: DeviceTensor, chosen: SamplingRows, level: int, inputs: TreeInputs, stream: Any
) -> None:
    held, words, slots = array_of(trees).view(GROWING_TREE)[:, 0], array_of(found), len(trees)
    results = array_of(chosen.results).view(ROW_RESULT)[:, 0]
    rows_of_slot = len(words) // slots
    for slot, tree in enumerate(held):
        successors = []
        for parent in frontier(tree, level):
            row = slot * rows_of_slot + max(parent, 0)
            if results[row]["error"] == NO_ERROR:
                ids, logprobs = words[row, 1:].reshape(2, -1)
                count = np.count_nonzero(ids >= 0)
                successors.append(Successors(parent, int(results[row]["token"]), ids[:count], logprobs[:count].view(np.float32)))
        grow(tree, level, successors)
    width = len(inputs.ids) // slots
    for slot, tree in enumerate(held):
        _write_inputs(tree, level, inputs, slice(slot * width, (slot + 1) * width))


def _write_inputs(tree: Any, level: int, inputs: TreeInputs, of_slot: slice) -> None:
    ids, ancestors = array_of(inputs.ids)[of_slot], array_of(inputs.ancestors)[of_slot].view(np.uint64)
    params = array_of(inputs.params)[of_slot].view(ROW_PARAMS)[:, 0]
    ids[...], ancestors[...] = 0, np.uint64(1) << np.arange(len(ids), dtype=np.uint64)
    params[...] = tree["params"]
    params["counter"] += np.uint64(level)
    count = min(int(tree["count"]), len(ids))
    ids[:count] = tree["tokens"][:count]
    for token, parent in enumerate(tree["parents"][:count].tolist()):
        if parent >= 0:
            ancestors[token] |= ancestors[parent]
    if inputs.depths is not None:
        array_of(inputs.depths)[of_slot] = [bits.bit_count() - 1 for bits in ancestors.tolist()]
    goes_on = np.isin(np.arange(len(ids)), frontier(tree, level + 1))
    params["flags"] = np.where(goes_on, params["flags"] | LOGPROBS, 0)


def _gather_parents_on_host(trees: DeviceTensor, sequences: DeviceTensor, last: DeviceTensor, out: DeviceTensor, stream: Any) -> None:
    own, rows, into = map(array_of, (sequences, last, out))
    width = len(into) // len(trees)
    for slot, tree in enumerate(array_of(trees).view(GROWING_TREE)[:, 0]):
        parents: Array = tree["parents_before"][: tree["count"]]
        first = slot * width
        into[first : first + len(parents)] = np.where((parents < 0)[:, None], own[slot], rows[first + np.maximum(parents, 0)])


# --- CUDA: launches of plugins/draft_trees.cu ---


def _grow_trees_on_device(
    trees: DeviceTensor, found: DeviceTensor, chosen: SamplingRows, level: int, inputs: TreeInputs, stream: Any
) -> None:
    slots = len(trees)
    rows, top = len(found) // slots, (found.shape[1] - 1) // 2
    written = (inputs.ids.ptr, inputs.ancestors.ptr, address(inputs.depths), inputs.params.ptr, len(inputs.ids) // slots)
    arguments = (trees.ptr, found.ptr, top, chosen.results.ptr, rows, level, *written)
    launch(trees.memory, "draft_trees", "grow_trees", (slots, 1, 1), arguments, stream, threads=TREE_THREADS)


def _gather_parents_on_device(trees: DeviceTensor, sequences: DeviceTensor, last: DeviceTensor, out: DeviceTensor, stream: Any) -> None:
    slots, nbytes = len(trees), out.shape[1] * itemsize(out.dtype)
    width = len(out) // slots
    grid = (blocks_for(-(-nbytes // ROW_GRANULE), len(out)), width, slots)
    arguments = (sequences.ptr, last.ptr, trees.ptr, out.ptr, nbytes, width)
    launch(trees.memory, "draft_trees", "gather_parents", grid, arguments, stream)


# --- without checks, for engines ---

#: Add a level to trees uint8 ``[A, 1616]`` (``GROWING_TREE``), from what ``token_logprobs`` has found after each token of the last enqueue
#: and what was chosen there; and write the inputs of the next enqueue. Level 1 has one row of each slot, after the sequence.
grow_trees_kernel = Kernel(_grow_trees_on_host, _grow_trees_on_device)

#: Gather the row of the parent of each token of trees, into ``[A * s, width]``: of the last enqueue ``[A * s, width]``, or of the sequence
#: ``[A, width]``. The rows after the last token of a tree stay.
gather_parents_kernel = Kernel(_gather_parents_on_host, _gather_parents_on_device)
