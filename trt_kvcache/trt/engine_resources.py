"""``EngineResources``: allocations, TensorRT objects and collected messages of an engine, released when it is closed."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from trt_kvcache.memory.base import Allocation, Memory
from trt_kvcache.trt.log import Messages
from trt_kvcache.trt.module import TensorRT


class EngineResources:
    """Owns the allocations and TensorRT objects of an engine, and releases them in reverse order."""

    def __init__(self, tensorrt: TensorRT, memory: Memory) -> None:
        self.memory = memory
        self._stack = ExitStack()
        self._last_stream: Any = None
        self.messages: Messages = self._stack.enter_context(tensorrt.log.collect())

    def callback(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function at :meth:`close`, before all that was registered earlier."""
        self._stack.callback(function, *arguments)

    def allocate(self, nbytes: int, *, stream: Any, zeroed: bool = False) -> Allocation:
        """Allocate device memory that lives as long as the engine, aligned to 256. Stream-ordered."""
        allocation = self.memory.allocate(nbytes, zeroed=zeroed, stream=stream)
        self._stack.callback(allocation.close)
        return allocation

    def note_enqueue(self, stream: Any) -> None:
        """Remember the stream of the last enqueue, which :meth:`close` waits for."""
        self._last_stream = stream

    def close(self) -> None:
        """Wait for the last enqueue and release everything, even if the wait fails. Idempotent."""
        stream, self._last_stream = self._last_stream, None
        with self._stack:
            is_stream = hasattr(stream, "sync")  # a graph builder cannot be waited for
            if is_stream and not getattr(stream, "is_closed", False):
                self.memory.synchronize(stream)
