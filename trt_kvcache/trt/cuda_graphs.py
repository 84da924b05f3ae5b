"""``CudaGraphCache``: runs work on a stream, captures it as a CUDA graph the second time, and replays that graph from then on."""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any

from trt_kvcache.errors import CudaError
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.cuda_driver import cuda_core_error

#: Most graphs that are kept, and most keys that are remembered without a graph. The least recently used one is dropped.
MAX_GRAPHS = 64
#: Eager runs of a key between a capture that failed and the next attempt; twice as many after each further failure.
RUNS_BEFORE_RETRY = 16
#: Most reasons that are kept.
MAX_REFUSALS = 8


class _EagerKey:
    """A key without a graph: how many eager runs it needs before an attempt to capture it."""

    def __init__(self) -> None:
        self.runs_left = 1
        self._wait = RUNS_BEFORE_RETRY

    def note_failure(self) -> None:
        """Wait for more eager runs: what failed may be compiled or loaded by then."""
        self.runs_left = self._wait
        self._wait *= 2


class CudaGraphCache:
    """Runs work on a stream, and replays it as a CUDA graph from the second time on.

    The first run is eager, so that kernels load or compile before the capture. A key must have every address of the graph.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._graphs: OrderedDict[Hashable, Any] = OrderedDict()
        self._without_graph: OrderedDict[Hashable, _EagerKey] = OrderedDict()
        #: Reasons why work ran eagerly that could have been a graph, each once.
        self.refusals: list[str] = []
        self._has_warned = False

    def run(self, key: Hashable, stream: Any, work: Callable[[Any], None], refusal: Callable[[Any], str | None]) -> bool:
        """Run ``work(stream)``, or replay its graph; returns True if it ran eagerly. Waits only when it evicts a graph.

        In a capture, the work becomes part of that capture. Where ``refusal(stream)`` gives a reason, it runs eagerly.
        """
        if not hasattr(stream, "create_graph_builder") or self._memory.is_capturing(stream):
            work(stream)
            return False
        graph = self._graphs.get(key)
        if graph is None and (known := self._without_graph.get(key)) is not None and known.runs_left <= 0:
            graph = self._capture(key, known, stream, work, refusal)
        if graph is None:
            work(stream)
            self._count_eager_run(key)
            return True
        self._graphs.move_to_end(key)
        try:
            graph.launch(stream)
        except cuda_core_error() as error:
            raise CudaError(f"the CUDA graph of a step cannot be launched: {error}") from error
        return False

    def _capture(
        self, key: Hashable, known: _EagerKey, stream: Any, work: Callable[[Any], None], refusal: Callable[[Any], str | None]
    ) -> Any:
        """Capture the work and return its graph, or None where it is refused or the capture fails."""
        reason = refusal(stream)
        if reason is not None:
            self._note_refusal(reason)
            return None
        try:
            graph = _captured(stream, work)
        except (RuntimeError, cuda_core_error()) as error:
            known.note_failure()
            self._note_refusal(str(error))
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"a step could not be captured in a CUDA graph and runs without one for now: {error}", RuntimeWarning, stacklevel=2
                )
            return None
        del self._without_graph[key]
        self._graphs[key] = graph
        if len(self._graphs) > MAX_GRAPHS:
            self._memory.synchronize(stream)  # the graph that is closed may still be running
            self._graphs.popitem(last=False)[1].close()
        return graph

    def _note_refusal(self, reason: str) -> None:
        if reason not in self.refusals and len(self.refusals) < MAX_REFUSALS:
            self.refusals.append(reason)

    def _count_eager_run(self, key: Hashable) -> None:
        self._without_graph.setdefault(key, _EagerKey()).runs_left -= 1
        self._without_graph.move_to_end(key)
        if len(self._without_graph) > MAX_GRAPHS:
            self._without_graph.popitem(last=False)

    def close(self) -> None:
        """Close all graphs; none of them may be running. Idempotent."""
        while self._graphs:
            self._graphs.popitem()[1].close()


def _captured(stream: Any, work: Callable[[Any], None]) -> Any:
    """Return the graph of work. A capture that fails is ended too: the stream would stay in it."""
    builder = stream.create_graph_builder()
    try:
        builder.begin_building("thread_local")
        work(builder)
        return builder.end_building().complete()
    finally:
        if builder.is_building:
            with suppress(RuntimeError, cuda_core_error()):
                builder.end_building()
        builder.close()
