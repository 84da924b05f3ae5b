"""``StepGraphs``: CUDA graphs of whole steps, captured when a step comes back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from trt_kvcache.memory import Memory

#: Graphs kept at most: the one that was not replayed for longest goes.
MOST_GRAPHS = 64


class StepGraphs:
    """Runs work on a stream, as a CUDA graph from the second time on.

    The first time it runs plainly, so that whatever is loaded or compiled once is not captured. A graph holds addresses: all
    that it depends on must be in its key, and must stay as long as the graph.

    Parameters
    ----------
    memory : Memory
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._graphs: OrderedDict[Hashable, Any] = OrderedDict()  # None: ran plainly once

    def run(self, key: Hashable, stream: Any, work: Callable[[Any], None], can_capture: Callable[[Any], bool]) -> None:
        """Run ``work(stream)``, or replay its graph.

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
        """
        graph = self._graphs.get(key)
        if not hasattr(stream, "create_graph_builder") or self._memory.is_capturing(stream):
            work(stream)
        elif graph is not None:
            self._graphs.move_to_end(key)
            graph.launch(stream)
        elif key not in self._graphs or not can_capture(stream):
            work(stream)
            self._keep(key, None)
        else:
            graph = _capture(stream, work)
            self._keep(key, graph)
            graph.launch(stream)

    def _keep(self, key: Hashable, graph: Any) -> None:
        self._graphs[key] = graph
        self._graphs.move_to_end(key)
        while len(self._graphs) > MOST_GRAPHS:
            _close(self._graphs.popitem(last=False)[1])

    def close(self) -> None:
        """Let go of all graphs. None of them may be running. Idempotent."""
        while self._graphs:
            _close(self._graphs.popitem()[1])


def _capture(stream: Any, work: Callable[[Any], None]) -> Any:
    builder = stream.create_graph_builder()
    try:
        builder.begin_building("thread_local")
        work(builder)
        return builder.end_building().complete()
    finally:
        builder.close()


def _close(graph: Any) -> None:
    if graph is not None:
        graph.close()
