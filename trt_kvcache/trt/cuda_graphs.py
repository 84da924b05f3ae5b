"""``CudaGraphCache``: runs work on a stream, and from the third time on replays it as a CUDA graph.

A graph that was captured from an execution context is valid for the shapes and addresses of that context, and NVIDIA advises one context
for each graph (docs.nvidia.com/deeplearning/tensorrt-rtx, "Optimizing TensorRT-RTX Performance"). With full TensorRT a graph must not be
replayed once other shapes were set, which change state of the context (NVIDIA/TensorRT, issue 3798). So a graph is captured from a copy
of the work with contexts of its own, which nothing changes afterwards.
"""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, Protocol

from trt_kvcache.errors import CudaError
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.cuda_driver import cuda_core_error

#: Most graphs that are kept, and most keys that are remembered without a graph. The least recently used one is dropped.
MAX_GRAPHS = 64
#: Eager runs of a key between a capture that failed and the next attempt; twice as many after each further failure.
RUNS_BEFORE_RETRY = 16
#: Most reasons that are kept.
MAX_REFUSALS = 8


class WorkCopy(Protocol):
    """Work over state that is its own, and that nothing changes."""

    def run(self, stream: Any) -> None:
        """Run the work.

        Parameters
        ----------
        stream : cuda.core.Stream or cuda.core.GraphBuilder
            All of the work is ordered on it.
        """

    def refusal(self, stream: Any) -> str | None:
        """Return why the work cannot be captured.

        Parameters
        ----------
        stream : cuda.core.Stream
            The stream to capture on.

        Returns
        -------
        str or None
            None if it can be captured.
        """

    def close(self) -> None:
        """Release the state; the work is not running."""


class Work(Protocol):
    """Work over state that may change before it is run again."""

    def run(self, stream: Any) -> None:
        """Run the work.

        Parameters
        ----------
        stream : cuda.core.Stream or cuda.core.GraphBuilder
            All of the work is ordered on it.
        """

    def copy(self, stream: Any) -> WorkCopy:
        """Return the same work over a copy of its current state.

        Parameters
        ----------
        stream : cuda.core.Stream
            The stream of the next run.

        Returns
        -------
        WorkCopy
            To be run eagerly once before it is captured, so that kernels are compiled and deferred updates made.

        Raises
        ------
        RuntimeError
            The state cannot be copied.
        """


class _Countdown:
    """Eager runs until the next attempt."""

    def __init__(self, runs: int) -> None:
        self.runs_left = runs
        self._wait = RUNS_BEFORE_RETRY

    def note_failure(self) -> None:
        """Wait for more eager runs: what failed may be compiled or loaded by then."""
        self.runs_left = self._wait
        self._wait *= 2


class _Entry:
    """The copy of a key's work, and its graph once there is one."""

    def __init__(self, copy: WorkCopy) -> None:
        self.copy = copy
        self.graph: Any = None
        self.countdown = _Countdown(1)

    def close(self) -> None:
        """Close the graph, then the work that it was captured from."""
        if self.graph is not None:
            self.graph.close()
        self.copy.close()


class CudaGraphCache:
    """Runs work on a stream; work that is run again is copied, run once more, captured, and replayed as a CUDA graph from then on.

    A key must have every address and shape of the work.
    """

    def __init__(self, memory: Memory, *, max_graphs: int = MAX_GRAPHS, eager_runs: int = 1) -> None:
        self._memory = memory
        self._max_graphs, self._eager_runs = max_graphs, eager_runs
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._countdowns: OrderedDict[Hashable, _Countdown] = OrderedDict()  # of keys without a copy
        #: Reasons why work ran eagerly that could have been a graph, each once.
        self.refusals: list[str] = []
        self._has_warned = False

    def run(self, key: Hashable, stream: Any, work: Work) -> None:
        """Run the work, or replay its graph. Waits only when it drops a graph. In a capture, the work becomes part of that capture."""
        if not hasattr(stream, "create_graph_builder") or self._memory.is_capturing(stream):
            work.run(stream)
            return
        entry = self._entries.get(key)
        if entry is None:
            entry = self._admit(key, stream, work)
        if entry is None:
            work.run(stream)
            return
        self._entries.move_to_end(key)
        if entry.graph is None and entry.countdown.runs_left <= 0:
            self._capture(entry, stream)
        if entry.graph is None:
            entry.copy.run(stream)
            entry.countdown.runs_left -= 1
            return
        try:
            entry.graph.launch(stream)
        except cuda_core_error() as error:
            raise CudaError(f"the CUDA graph of a step cannot be launched: {error}") from error

    def _admit(self, key: Hashable, stream: Any, work: Work) -> _Entry | None:
        """Copy the work of a key that has run often enough; None for others, and where the copy fails."""
        countdown = self._countdowns.setdefault(key, _Countdown(self._eager_runs))
        self._countdowns.move_to_end(key)
        if countdown.runs_left > 0:
            countdown.runs_left -= 1
            if len(self._countdowns) > MAX_GRAPHS:
                self._countdowns.popitem(last=False)
            return None
        try:
            entry = _Entry(work.copy(stream))
        except (RuntimeError, cuda_core_error()) as error:
            self._note_failure(countdown, error)
            return None
        del self._countdowns[key]
        self._entries[key] = entry
        if len(self._entries) > self._max_graphs:
            self._memory.synchronize(stream)  # the graph that is closed may still be running
            self._entries.popitem(last=False)[1].close()
        return entry

    def _capture(self, entry: _Entry, stream: Any) -> None:
        """Capture the graph of an entry, unless it is refused or the capture fails."""
        reason = entry.copy.refusal(stream)
        if reason is not None:
            self._note_refusal(reason)
            return
        try:
            entry.graph = _captured(stream, entry.copy.run)
        except (RuntimeError, cuda_core_error()) as error:
            self._note_failure(entry.countdown, error)

    def _note_failure(self, countdown: _Countdown, error: Exception) -> None:
        countdown.note_failure()
        self._note_refusal(str(error))
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"a step could not be captured in a CUDA graph and runs without one for now: {error}", RuntimeWarning, stacklevel=2
            )

    def _note_refusal(self, reason: str) -> None:
        if reason not in self.refusals and len(self.refusals) < MAX_REFUSALS:
            self.refusals.append(reason)

    def close(self) -> None:
        """Close all graphs; none of them may be running. Idempotent."""
        while self._entries:
            self._entries.popitem()[1].close()


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
