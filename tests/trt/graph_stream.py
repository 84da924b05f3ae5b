"""A stream that can be captured in a CUDA graph, and notes what becomes of the graphs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.helpers.fake_tensorrt import FakeStream


class GraphStream(FakeStream):
    """A stream that captures: a graph notes that it was launched. It is its own graph builder."""

    def __init__(self, handle: int, calls: list[Any]) -> None:
        super().__init__(handle)
        self.calls, self.graphs, self.is_building = calls, 0, False

    def create_graph_builder(self) -> GraphStream:
        self.graphs += 1
        return self

    def begin_building(self, mode: str) -> None:
        assert mode == "thread_local"
        self.is_building = True

    def end_building(self) -> GraphStream:
        assert self.is_building
        self.is_building = False
        return self

    def complete(self) -> Any:
        number, note = self.graphs, self.calls.append
        return SimpleNamespace(launch=lambda stream: note(("graph", number, stream.handle)), close=lambda: note(("graph.close", number)))

    def close(self) -> None:
        assert not self.is_building, "a stream whose capture is not ended stays in it"
        self.calls.append(("captured",))
