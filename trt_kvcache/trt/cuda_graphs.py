"""``CudaGraphCache``: CUDA graphs of whole steps, captured when a step comes back."""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from trt_kvcache.errors import CudaError
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.cuda_driver import cuda_core_error

#: Graphs kept at most, and keys without one: that which was not replayed for longest goes.
MAX_GRAPHS = 64


class CudaGraphCache:
    """Runs work on a stream, as a CUDA graph from the second time on.

    The first time it runs plainly, so that whatever is loaded or compiled once is not captured. A graph holds addresses: all
    that it depends on must be in its key, and must stay as long as the graph.

    Parameters
    ----------
    memory : Memory
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._graphs: OrderedDict[Hashable, Any] = OrderedDict()
        self._plain: OrderedDict[Hashable, bool] = OrderedDict()  # ran plainly: whether to capture
        self._warned = False

    def run(self, key: Hashable, stream: Any, work: Callable[[Any], None], can_capture: Callable[[Any], bool]) -> bool:
        """Run ``work(stream)``, or replay its graph. Waits for the stream only where it lets go of a graph.

        Parameters
        ----------
        key : hashable
            The same for the same work only.
        stream : cuda.core.Stream or GraphBuilder
            What is captured already is not captured apart: the work goes into that graph.
        work : callable
            Enqueues on the stream, or graph builder, that it is given.
        can_capture : callable
            Asked before a capture; the work runs plainly where it says no.

        Returns
        -------
        bool
            Whether it ran plainly, in no graph.

        Raises
        ------
        CudaError
            The graph cannot be launched. Where a capture fails, the work runs plainly, now and later, with one warning.
        """
        if not hasattr(stream, "create_graph_builder") or self._memory.is_capturing(stream):
            work(stream)
            return False
        graph = self._graphs.get(key)
        if graph is None and self._plain.get(key) and can_capture(stream):
            graph = self._capture(key, stream, work)
        if graph is None:
            work(stream)
            self._note(key, self._plain.get(key, True))
            return True
        self._graphs.move_to_end(key)
        try:
            graph.launch(stream)
        except cuda_core_error() as error:
            raise CudaError(f"the CUDA graph of a step cannot be launched: {error}") from error
        return False

    def _capture(self, key: Hashable, stream: Any, work: Callable[[Any], None]) -> Any:
        """Return the graph, or None where there is none."""
        try:
            builder = stream.create_graph_builder()
            try:
                builder.begin_building("thread_local")
                work(builder)
                graph = builder.end_building().complete()
            finally:
                builder.close()
        except (RuntimeError, cuda_core_error()) as error:
            self._note(key, False)
            if not self._warned:
                self._warned = True
                warnings.warn(f"a step could not be captured in a CUDA graph and runs without one: {error}", RuntimeWarning, stacklevel=2)
            return None
        self._graphs[key] = graph
        if len(self._graphs) > MAX_GRAPHS:
            self._memory.synchronize(stream)  # it may run
            self._graphs.popitem(last=False)[1].close()
        return graph

    def _note(self, key: Hashable, may_capture: bool) -> None:
        self._plain[key] = may_capture
        self._plain.move_to_end(key)
        if len(self._plain) > MAX_GRAPHS:
            self._plain.popitem(last=False)

    def close(self) -> None:
        """Let go of all graphs. None of them may be running. Idempotent."""
        while self._graphs:
            self._graphs.popitem()[1].close()
