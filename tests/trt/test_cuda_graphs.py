"""``CudaGraphCache`` over streams that note what is captured, launched and closed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest

from tests.helpers.fake_tensorrt import FakeGpuMemory, FakeStream
from tests.trt.graph_stream import GraphStream
from trt_kvcache.errors import CudaError
from trt_kvcache.memory.cuda_driver import cuda_core_error
from trt_kvcache.trt.cuda_graphs import MAX_GRAPHS, MAX_REFUSALS, RUNS_BEFORE_RETRY, CudaGraphCache

HANDLE = 0x77


class Scene:
    """A cache of graphs, a stream, and what was called on them."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.memory = FakeGpuMemory()
        self.stream = GraphStream(HANDLE, self.calls)
        self.graphs = CudaGraphCache(self.memory)

    def run(self, key: Hashable, stream: Any = None, refusal: Callable[[Any], str | None] = lambda stream: None) -> bool:
        def work(stream: Any) -> None:
            self.calls.append(("eager", key))

        return self.graphs.run(key, stream or self.stream, work, refusal)

    def take(self) -> list[Any]:
        """Return the calls so far, and forget them."""
        taken = self.calls[:]
        self.calls.clear()
        return taken


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_work_runs_eagerly_the_first_time(scene: Scene) -> None:
    assert scene.run("a")
    assert scene.take() == [("eager", "a")]


def test_work_is_captured_and_launched_the_second_time(scene: Scene) -> None:
    scene.run("a")
    scene.take()
    assert not scene.run("a")
    assert scene.take() == [("eager", "a"), ("captured",), ("graph", 1, HANDLE)]


def test_work_is_replayed_from_the_third_time_on(scene: Scene) -> None:
    for _ in range(2):
        scene.run("a")
    scene.take()
    for _ in range(3):
        assert not scene.run("a")
    assert scene.take() == [("graph", 1, HANDLE)] * 3


def test_each_key_has_a_graph_of_its_own(scene: Scene) -> None:
    for key in "abab":
        scene.run(key)
    scene.take()
    scene.run("b")
    scene.run("a")
    assert scene.take() == [("graph", 2, HANDLE), ("graph", 1, HANDLE)]


def test_nothing_is_captured_while_it_is_refused(scene: Scene) -> None:
    for _ in range(3):
        assert scene.run("a", refusal=lambda stream: "not yet")
    assert scene.take() == [("eager", "a")] * 3
    assert scene.graphs.refusals == ["not yet"]
    assert not scene.run("a")


def test_the_reasons_that_are_kept_are_few(scene: Scene) -> None:
    for number in range(2 * MAX_REFUSALS):
        scene.run("a", refusal=lambda stream, number=number: f"reason {number}")  # type: ignore[misc]
    assert scene.graphs.refusals == [f"reason {number}" for number in range(1, 1 + MAX_REFUSALS)]  # the first run asks nothing


def test_work_becomes_part_of_a_capture_that_is_under_way(scene: Scene) -> None:
    for _ in range(2):
        scene.run("a")
    scene.take()
    scene.memory.is_capturing = lambda stream: True  # type: ignore[method-assign]
    assert not scene.run("a")
    assert scene.take() == [("eager", "a")]


def test_a_stream_that_cannot_capture_runs_eagerly(scene: Scene) -> None:
    for _ in range(3):
        assert not scene.run("a", stream=FakeStream(2))
    assert scene.take() == [("eager", "a")] * 3


def test_the_least_recently_used_graph_is_closed_after_a_wait(scene: Scene) -> None:
    for key in range(MAX_GRAPHS):
        scene.run(key)
        scene.run(key)
    scene.run(0)  # graph 2 is now the oldest
    scene.take()
    assert scene.stream.synced == 0
    scene.run("one more")
    scene.run("one more")
    assert scene.stream.synced == 1
    assert [call for call in scene.take() if call[0] == "graph.close"] == [("graph.close", 2)]


def test_keys_that_never_come_back_push_no_graph_out(scene: Scene) -> None:
    scene.run("kept")
    scene.run("kept")
    for key in range(2 * MAX_GRAPHS):
        scene.run(key)
    scene.take()
    assert not scene.run("kept")
    assert scene.take() == [("graph", 1, HANDLE)]


def test_close_closes_every_graph_once(scene: Scene) -> None:
    for key in "aabb":
        scene.run(key)
    scene.take()
    scene.graphs.close()
    scene.graphs.close()
    assert sorted(scene.take()) == [("graph.close", 1), ("graph.close", 2)]


def failing(error: type[Exception]) -> Callable[..., Any]:
    def fail(*arguments: Any) -> Any:
        raise error("LOST")

    return fail


@pytest.fixture(params=["RuntimeError", "CUDAError"])
def error(request: pytest.FixtureRequest) -> type[Exception]:
    """What a failing capture raises: the work, or cuda-core."""
    return RuntimeError if request.param == "RuntimeError" else cuda_core_error()


def test_a_capture_that_fails_is_tried_again_after_more_eager_runs(
    scene: Scene, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(scene.stream, "complete", failing(error))
        scene.run("a")
        with pytest.warns(RuntimeWarning, match="a step could not be captured in a CUDA graph and runs without one for now: LOST"):
            assert scene.run("a")
        assert scene.graphs.refusals == ["LOST"]
        scene.take()
        for _ in range(RUNS_BEFORE_RETRY - 1):
            assert scene.run("a")
        assert scene.take() == [("eager", "a")] * (RUNS_BEFORE_RETRY - 1)
        assert scene.run("a")
        assert ("captured",) in scene.take(), "tried again"
        for _ in range(2 * RUNS_BEFORE_RETRY - 1):
            assert scene.run("a")
        assert ("captured",) not in scene.take(), "the second wait is longer"
    assert not scene.run("a")


def test_a_capture_that_fails_is_ended(scene: Scene, error: type[Exception]) -> None:
    def work(stream: Any) -> None:
        if scene.stream.is_building:
            raise error("LOST")

    scene.graphs.run("a", scene.stream, work, lambda stream: None)
    with pytest.warns(RuntimeWarning, match="LOST"):
        assert scene.graphs.run("a", scene.stream, work, lambda stream: None)
    assert not scene.stream.is_building
    assert scene.take() == [("captured",)]


def test_only_the_first_failing_capture_is_warned_of(scene: Scene, error: type[Exception]) -> None:
    scene.stream.complete = failing(error)  # type: ignore[method-assign]
    scene.run("a")
    with pytest.warns(RuntimeWarning, match="LOST"):
        scene.run("a")
    scene.run("b")
    assert scene.run("b")  # a warning would be an error


def test_a_graph_that_cannot_be_launched_is_an_error(scene: Scene) -> None:
    for _ in range(2):
        scene.run("a")
    graph = scene.graphs._graphs["a"]
    graph.launch = failing(cuda_core_error())
    with pytest.raises(CudaError, match=r"^the CUDA graph of a step cannot be launched: LOST$"):
        scene.run("a")
