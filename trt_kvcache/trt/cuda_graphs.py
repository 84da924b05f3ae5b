"""``CudaGraphCache``: runs work on a stream, captures it as a CUDA graph the second time, and replays that graph from then on."""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from trt_kvcache.errors import CudaError
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.cuda_driver import cuda_core_error

#: Most graphs that are kept, and most keys that are remembered without a graph. The least recently used one is dropped.
MAX_GRAPHS = 64


class CudaGraphCache:
    """Runs work on a stream, and replays it as a CUDA graph from the second time on.

    The first run is eager, so that kernels load or compile before the capture. A key must have every address of the graph.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._graphs: OrderedDict[Hashable, Any] = OrderedDict()
        #: Keys without a graph that ran eagerly before, and whether a capture is worth trying.
        self._without_graph: OrderedDict[Hashable, bool] = OrderedDict()
        self._has_warned = False

    def run(self, key: Hashable, stream: Any, work: Callable[[Any], None], can_capture: Callable[[Any], bool]) -> bool:
        """Run ``work(stream)``, or replay its graph; returns True if it ran eagerly. Waits only when it evicts a graph.

        In a capture, the work becomes part of that capture. Where ``can_capture(stream)`` is False, it runs eagerly.
        """
        if not hasattr(stream, "create_graph_builder") or self._memory.is_capturing(stream):
            work(stream)
            return False
        graph = self._graphs.get(key)
        if graph is None and self._without_graph.get(key) and can_capture(stream):
            graph = self._capture(key, stream, work)
        if graph is None:
            work(stream)
            self._remember(key, self._without_graph.get(key, True))
            return True
        self._graphs.move_to_end(key)
        try:
            graph.launch(stream)
        except cuda_core_error() as error:
            raise CudaError(f"the CUDA graph of a step cannot be launched: {error}") from error
        return False

    def _capture(self, key: Hashable, stream: Any, work: Callable[[Any], None]) -> Any:
        """Capture the work and return its graph, or None where the capture fails."""
        try:
            builder = stream.create_graph_builder()
            try:
                builder.begin_building("thread_local")
                work(builder)
                graph = builder.end_building().complete()
            finally:
                builder.close()
        except (RuntimeError, cuda_core_error()) as error:
            self._remember(key, False)
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(f"a step could not be captured in a CUDA graph and runs without one: {error}", RuntimeWarning, stacklevel=2)
            return None
        self._graphs[key] = graph
        if len(self._graphs) > MAX_GRAPHS:
            self._memory.synchronize(stream)  # the graph that is closed may still be running
            self._graphs.popitem(last=False)[1].close()
        return graph

    def _remember(self, key: Hashable, may_capture: bool) -> None:
        """Note that the work of ``key`` ran eagerly, and whether a later run may be captured."""
        self._without_graph[key] = may_capture
        self._without_graph.move_to_end(key)
        if len(self._without_graph) > MAX_GRAPHS:
            self._without_graph.popitem(last=False)

    def close(self) -> None:
        """Close all graphs; none of them may be running. Idempotent."""
        while self._graphs:
            self._graphs.popitem()[1].close()
