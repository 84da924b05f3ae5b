"""``DeviceTrees``: the draft trees of all slots in device memory, which grow there level by level."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from trt_kvcache._util.lifetime import Uncopyable
from trt_kvcache.errors import CudaError
from trt_kvcache.generation.device_sampler import Positions
from trt_kvcache.generation.draft_tree import DraftTree
from trt_kvcache.generation.growing_tree import tree_of
from trt_kvcache.kernels.draft_tree_kernels import TreeInputs, grow_trees_kernel
from trt_kvcache.kernels.growing_trees import GROWING_TREE
from trt_kvcache.kernels.sampling_kernels import choose_tokens_kernel, token_logprobs_kernel
from trt_kvcache.kernels.sampling_rows import ACTIVE, GREEDY, LOGPROBS, ROW_PARAMS, ROW_RESULT, SamplingRows
from trt_kvcache.kernels.sampling_workspace import SamplingWorkspace
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.cuda_driver import cuda_core_error
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor


class WantedTree(NamedTuple):
    """A tree that a slot is to grow."""

    #: Position of the next token of the request; the draft model chooses with its random numbers. Penalties and bias are ignored.
    position: Positions
    #: Most tokens, and most tokens on a path.
    limit: int
    depth: int


class TreesInFlight:
    """Trees on their way to the host: see :meth:`DeviceTrees.download`."""

    def __init__(self, page: Any, done: Any) -> None:
        self._page, self._done = page, done

    def read(self) -> list[DraftTree]:
        """Wait for the trees alone, and return them. Raises CudaError."""
        if self._done is not None:
            try:
                self._done.sync()
            except cuda_core_error() as error:
                raise CudaError(f"the draft trees of a step could not be read: {error}") from None
        return [tree_of(tree) for tree in self._page.view(GROWING_TREE)[:, 0]]


class DeviceTrees(Uncopyable):
    """Grows trees by the rules of :class:`~trt_kvcache.generation.growing_tree.GrowingTree`, from logits on the device.

    A step is :meth:`begin`, :meth:`grow` for each level, :meth:`download` and :meth:`TreesInFlight.read`. Only the last one waits.
    """

    def __init__(self, memory: Memory, *, max_slots: int, max_width: int, vocab_size: int, stream: Any) -> None:
        """``max_width``: tokens of each slot in an enqueue, at most."""
        self._memory = memory
        rows = max_slots * max_width
        self._workspace = SamplingWorkspace(memory, rows=rows, vocab_size=vocab_size, edits=False, max_top=max_width, stream=stream)
        self._trees, params, results, self._tokens, self._found = (
            DeviceTensor(memory.allocate(dense_nbytes(shape, dtype), zeroed=True, stream=stream), shape=shape, dtype=dtype)
            for shape, dtype in (
                *(((max_slots, GROWING_TREE.itemsize), "uint8"), ((rows, ROW_PARAMS.itemsize), "uint8")),
                *(((rows, ROW_RESULT.itemsize), "uint8"), ((rows,), "int32"), ((rows, 1 + 2 * max_width), "int32")),
            )
        )
        self._rows = SamplingRows(params, results)
        self._first_trees, self._page = (memory.staging(self._trees.shape, "uint8") for _ in range(2))
        self._first_params = memory.staging((max_slots, ROW_PARAMS.itemsize), "uint8")
        # Most tokens of a tree that grows.
        self._top = 0

    def of_slots(self, count: int) -> DeviceTensor:
        """Return the trees of the first slots, ``GROWING_TREE``."""
        return self._trees[:count]

    def inputs(self, ids: DeviceTensor, ancestors: DeviceTensor, depths: DeviceTensor | None) -> TreeInputs:
        """Return the inputs of an enqueue ``[A * s]``, with the rows of the choices after it."""
        return TreeInputs(ids, ancestors, depths, self._rows.params[: len(ids)])

    def begin(self, wanted: Sequence[WantedTree | None], *, stream: Any) -> None:
        """Begin a tree in each slot from slot 0 on, None for a slot without one, stream-ordered. The last trees must have been read."""
        pages = self._first_trees[: len(wanted)], self._first_params[: len(wanted)]
        trees, rows = pages[0].view(GROWING_TREE)[:, 0], pages[1].view(ROW_PARAMS)[:, 0]
        pages[0][...] = 0
        for tree, one in zip(trees, wanted, strict=True):
            if one is not None:
                tree["limit"], tree["max_depth"] = one.limit, min(one.limit, one.depth)
                tree["params"] = one.position.row
                tree["params"]["counter"] = one.position.counter
        trees["params"]["flags"] &= ACTIVE | GREEDY
        rows[...] = trees["params"]
        rows["flags"] |= np.where(rows["flags"] & ACTIVE, LOGPROBS, 0)
        self._top = max(one.limit for one in wanted if one is not None)
        self._memory.upload(self._trees[: len(wanted)], pages[0], stream=stream)
        self._memory.upload(self._rows.params[: len(wanted)], pages[1], stream=stream)

    def grow(self, logits: DeviceTensor, level: int, inputs: TreeInputs, *, slots: int, stream: Any) -> None:
        """Add a level, from 1 on, and write the inputs of the next one. Neither waits nor allocates.

        ``logits``: float32 ``[slots, vocab]`` after the sequences for level 1, else ``[slots * s, vocab]`` after the tokens of the trees.
        """
        count = len(logits)
        rows = SamplingRows(self._rows.params[:count], self._rows.results[:count])
        found = DeviceTensor(self._found.allocation, shape=(count, 1 + 2 * self._top), dtype="int32")
        choose_tokens_kernel(logits, rows, self._tokens[:count], self._workspace, stream)
        token_logprobs_kernel(logits, rows, found, self._workspace, stream)
        grow_trees_kernel(self._trees[:slots], found, rows, level, inputs, stream)

    def download(self, slots: int, *, stream: Any) -> TreesInFlight:
        """Copy the trees of the first slots to pinned memory, stream-ordered. They must be read before the next download."""
        page = self._page[:slots]
        self._memory.download(page, self._trees[:slots], stream=stream)
        return TreesInFlight(page, None if self._memory.is_host else stream.record())

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self._workspace.close()
        for tensor in (self._trees, self._rows.params, self._rows.results, self._tokens, self._found):
            tensor.allocation.close()
