"""A stream that can be captured in a CUDA graph, and notes what becomes of the graphs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.helpers.fake_tensorrt import FakeStream


class GraphStream(FakeStream):
    """A stream that captures: a graph notes that it was launched. It is its own graph builder.

    ``enqueued`` are the contexts that a stand-in of TensorRT enqueues: as TensorRT's documentation says, no graph may be launched once a
    context that it was captured from has other shapes or addresses.
    """

    def __init__(self, handle: int, calls: list[Any], enqueued: list[Any] | None = None) -> None:
        super().__init__(handle)
        self.calls, self.graphs, self.is_building = calls, 0, False
        self.enqueued = [] if enqueued is None else enqueued

    def create_graph_builder(self) -> GraphStream:
        self.graphs += 1
        return self

    def begin_building(self, mode: str) -> None:
        assert mode == "thread_local"
        self.is_building = True
        self.enqueued.clear()

    def end_building(self) -> GraphStream:
        assert self.is_building
        self.is_building = False
        return self

    def complete(self) -> Any:
        number, note = self.graphs, self.calls.append
        captured = [(context, context.changes) for context in self.enqueued]

        def launch(stream: FakeStream) -> None:
            assert [context.changes for context, _ in captured] == [changes for _, changes in captured], (
                "undefined: the context has changed"
            )
            note(("graph", number, stream.handle))

        return SimpleNamespace(launch=launch, close=lambda: note(("graph.close", number)))

    def close(self) -> None:
        assert not self.is_building, "a stream whose capture is not ended stays in it"
        self.calls.append(("captured",))
