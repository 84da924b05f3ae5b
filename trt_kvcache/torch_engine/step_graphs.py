"""``StepGraphs``: CUDA graphs of steps by key, within a budget of GPU memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch

#: Keys without a graph that are remembered, and graphs, at most.
MAX_KEYS = 512
#: Reasons that are kept, at most.
MAX_REFUSALS = 8


class _StepGraph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    nbytes: int  # of GPU memory, without the pool


class StepGraphs:
    """A key runs eagerly first, is captured by its second run, and replayed from then on. The least recently used graph goes first."""

    # All graphs allocate from one pool. Work leaves nothing in it, since its results are in bound tensors: graphs may be replayed in any
    # order, but not at once on two streams.

    def __init__(self, device: torch.device, max_nbytes: int) -> None:
        self._device = device
        #: Budget of GPU memory of all graphs and of their pool. The last captured graph stays, whatever it takes.
        self.max_nbytes = max_nbytes
        #: Reasons why work ran eagerly although it was to be captured, each once.
        self.refusals: list[str] = []
        self._graphs: OrderedDict[Hashable, _StepGraph] = OrderedDict()
        self._eager: OrderedDict[Hashable, bool] = OrderedDict()  # keys that ran, and whether the next run is captured
        self._pool_nbytes = 0

    def __len__(self) -> int:
        """Return the number of graphs."""
        return len(self._graphs)

    @property
    def nbytes(self) -> int:
        """GPU memory of the graphs and their pool, by the driver's count of free memory."""
        return self._pool_nbytes + sum(one.nbytes for one in self._graphs.values())

    def run(self, key: Hashable | None, work: Callable[[], None]) -> None:
        """Run the work on the current stream, or replay its graph; work without a key is always eager. Waits where it captures."""
        if key is None:
            self._run_eagerly(work)
            return
        if self._eager.get(key, False):
            self._capture(key, work)
        known = self._graphs.get(key)
        if known is not None:
            self._graphs.move_to_end(key)
            known.graph.replay()
            return
        self._run_eagerly(work)
        self._eager.setdefault(key, True)
        self._eager.move_to_end(key)
        if len(self._eager) > MAX_KEYS:
            self._eager.popitem(last=False)

    def synchronize(self) -> None:
        """Wait for the device, if there are graphs."""
        if self._graphs:
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Wait for the graphs, and release them. Idempotent."""
        self.synchronize()
        self._graphs.clear()
        self._eager.clear()
        self._pool_nbytes = 0

    def _run_eagerly(self, work: Callable[[], None]) -> None:
        """Run the work; if memory is short, without the graphs, of which half are kept from then on."""
        try:
            work()
        except torch.OutOfMemoryError:
            if not self._graphs:
                raise
            self.max_nbytes = self.nbytes // 2
            self.close()
            torch.cuda.empty_cache()
            work()  # a step that failed can be repeated: it changes nothing that it reads

    def _capture(self, key: Hashable, work: Callable[[], None]) -> None:
        """Capture the work, which computes nothing now. If that fails, the key stays eager."""
        pool = next(iter(self._graphs.values())).graph.pool() if self._graphs else None
        torch.cuda.empty_cache()  # as torch.cuda.graph does, or the difference would be that too
        reserved, used = self._memory_in_use()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                work()
        except RuntimeError as error:  # no memory, for one; what is wrong with the work itself is raised by its eager run
            self._eager[key] = False
            if str(error) not in self.refusals and len(self.refusals) < MAX_REFUSALS:
                self.refusals.append(str(error))
            return
        reserved_after, used_after = self._memory_in_use()
        grown = max(reserved_after - reserved, 0)
        self._pool_nbytes += grown
        del self._eager[key]
        self._graphs[key] = _StepGraph(graph, max(used_after - used - grown, 0))
        self._evict()

    def _evict(self) -> None:
        """Drop graphs until the budget holds. The pool shrinks only with the last of them."""
        if self.nbytes > self.max_nbytes or len(self._graphs) > MAX_KEYS:
            self.synchronize()  # a graph that is dropped may still be running
        while len(self._graphs) > 1 and (self.nbytes > self.max_nbytes or len(self._graphs) > MAX_KEYS):
            self._graphs.popitem(last=False)

    def _memory_in_use(self) -> tuple[int, int]:
        """Return bytes that torch has reserved on the device, and all bytes that are in use there."""
        free, total = torch.cuda.mem_get_info(self._device)
        return torch.cuda.memory_reserved(self._device), total - free
