"""``CudaGraphCache`` over streams that note what is captured, launched and closed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.fake_tensorrt import FakeGpuMemory, FakeStream
from tests.trt.graph_stream import GraphStream
from trt_kvcache.errors import CudaError
from trt_kvcache.memory.cuda_driver import cuda_core_error
from trt_kvcache.trt.cuda_graphs import MAX_GRAPHS, MAX_REFUSALS, RUNS_BEFORE_RETRY, CudaGraphCache

HANDLE = 0x77


class Copy:
    """A copy of work."""

    def __init__(self, scene: Scene, key: Hashable) -> None:
        self.scene, self.key = scene, key

    def run(self, stream: Any) -> None:
        self.scene.calls.append(("copy", self.key))
        if self.scene.stream.is_building and self.scene.capture_error is not None:
            raise self.scene.capture_error("LOST")

    def refusal(self, stream: Any) -> str | None:
        return self.scene.refusal

    def close(self) -> None:
        self.scene.calls.append(("copy.close", self.key))


class Scene:
    """A cache of graphs, a stream, and what was called on them."""

    def __init__(self, **options: Any) -> None:
        self.calls: list[Any] = []
        self.memory = FakeGpuMemory()
        self.stream = GraphStream(HANDLE, self.calls)
        self.graphs = CudaGraphCache(self.memory, **options)
        self.refusal: str | None = None
        self.copy_error: type[Exception] | None = None
        self.capture_error: type[Exception] | None = None

    def run(self, key: Hashable, times: int = 1, *, stream: Any = None) -> list[Any]:
        """Run the work of a key so many times; return the calls."""

        def copy(on: Any) -> Copy:
            assert on is (stream or self.stream)
            if self.copy_error is not None:
                raise self.copy_error("NO ROOM")
            return Copy(self, key)

        for _ in range(times):
            self.graphs.run(key, stream or self.stream, SimpleNamespace(run=lambda on: self.calls.append(("eager", key)), copy=copy))
        taken = self.calls[:]
        self.calls.clear()
        return taken


@pytest.fixture
def scene() -> Scene:
    return Scene()


def graph(number: int) -> tuple[Any, ...]:
    return ("graph", number, HANDLE)


def test_work_runs_eagerly_then_as_a_copy_and_is_captured_the_third_time(scene: Scene) -> None:
    assert scene.run("a") == [("eager", "a")]
    assert scene.run("a") == [("copy", "a")]
    assert scene.run("a") == [("copy", "a"), ("captured",), graph(1)]
    assert scene.run("a", 3) == [graph(1)] * 3


def test_each_key_has_a_graph_of_its_own(scene: Scene) -> None:
    for key in "ababab":
        scene.run(key)
    assert scene.run("b") + scene.run("a") == [graph(2), graph(1)]


def test_rare_work_has_no_copy() -> None:
    scene = Scene(eager_runs=5)
    assert scene.run("a", 5) == [("eager", "a")] * 5
    assert scene.run("a", 2) == [("copy", "a"), ("copy", "a"), ("captured",), graph(1)]


def test_nothing_is_captured_while_it_is_refused(scene: Scene) -> None:
    scene.refusal = "not yet"
    assert scene.run("a", 4) == [("eager", "a"), *[("copy", "a")] * 3]
    assert scene.graphs.refusals == ["not yet"]
    scene.refusal = None
    assert scene.run("a")[-1] == graph(1)


def test_the_reasons_that_are_kept_are_few(scene: Scene) -> None:
    scene.run("a", 2)
    for number in range(2 * MAX_REFUSALS):
        scene.refusal = f"reason {number}"
        scene.run("a")
    assert scene.graphs.refusals == [f"reason {number}" for number in range(MAX_REFUSALS)]


def test_work_becomes_part_of_a_capture_that_is_under_way(scene: Scene) -> None:
    scene.run("a", 3)
    scene.memory.is_capturing = lambda stream: True  # type: ignore[method-assign]
    assert scene.run("a") == [("eager", "a")]


def test_a_stream_that_cannot_capture_runs_eagerly(scene: Scene) -> None:
    assert scene.run("a", 4, stream=FakeStream(2)) == [("eager", "a")] * 4


def test_the_least_recently_used_graph_is_closed_after_a_wait(scene: Scene) -> None:
    for key in range(MAX_GRAPHS):
        scene.run(key, 3)
    scene.run(0)  # graph 2 is now the oldest
    assert scene.stream.synced == 0
    calls = scene.run("one more", 2)
    assert scene.stream.synced == 1
    assert calls == [("eager", "one more"), ("graph.close", 2), ("copy.close", 1), ("copy", "one more")]


def test_a_cache_may_keep_fewer_graphs() -> None:
    scene = Scene(max_graphs=2)
    calls = scene.run("a", 3) + scene.run("b", 3) + scene.run("c", 3)
    assert [call for call in calls if "close" in call[0]] == [("graph.close", 1), ("copy.close", "a")]


def test_keys_that_never_come_back_push_no_graph_out(scene: Scene) -> None:
    scene.run("kept", 3)
    for key in range(2 * MAX_GRAPHS):
        scene.run(key)
    assert scene.run("kept") == [graph(1)]


def test_close_closes_every_graph_and_copy_once(scene: Scene) -> None:
    for key, times in (("a", 3), ("b", 3), ("c", 2), ("d", 1)):
        scene.run(key, times)
    scene.graphs.close()
    scene.graphs.close()
    closed = [("copy.close", "a"), ("copy.close", "b"), ("copy.close", "c"), ("graph.close", 1), ("graph.close", 2)]
    assert sorted(scene.calls) == closed
    assert scene.calls.index(("graph.close", 1)) < scene.calls.index(("copy.close", "a"))


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
        scene.run("a", 2)
        with pytest.warns(RuntimeWarning, match="a step could not be captured in a CUDA graph and runs without one for now: LOST"):
            assert scene.run("a")[-1] == ("copy", "a")
        assert scene.graphs.refusals == ["LOST"]
        assert scene.run("a", RUNS_BEFORE_RETRY - 1) == [("copy", "a")] * (RUNS_BEFORE_RETRY - 1)
        assert ("captured",) in scene.run("a"), "tried again"
        assert ("captured",) not in scene.run("a", 2 * RUNS_BEFORE_RETRY - 1), "the second wait is longer"
    assert scene.run("a")[-1] == graph(3)


def test_work_that_cannot_be_copied_runs_eagerly_and_is_tried_again(scene: Scene, error: type[Exception]) -> None:
    scene.copy_error = error
    scene.run("a")
    with pytest.warns(RuntimeWarning, match="a step could not be captured in a CUDA graph and runs without one for now: NO ROOM"):
        assert scene.run("a") == [("eager", "a")]
    assert scene.graphs.refusals == ["NO ROOM"]
    scene.copy_error = None
    assert scene.run("a", RUNS_BEFORE_RETRY) == [("eager", "a")] * RUNS_BEFORE_RETRY
    assert scene.run("a", 2)[-1] == graph(1)


def test_a_capture_that_fails_is_ended(scene: Scene, error: type[Exception]) -> None:
    scene.capture_error = error
    scene.run("a", 2)
    with pytest.warns(RuntimeWarning, match="LOST"):
        assert scene.run("a") == [("copy", "a"), ("captured",), ("copy", "a")]
    assert not scene.stream.is_building


def test_only_the_first_failing_capture_is_warned_of(scene: Scene, error: type[Exception]) -> None:
    scene.stream.complete = failing(error)  # type: ignore[method-assign]
    scene.run("a", 2)
    with pytest.warns(RuntimeWarning, match="LOST"):
        scene.run("a")
    assert scene.run("b", 3)[-1] == ("copy", "b")  # a warning would be an error


def test_a_graph_that_cannot_be_launched_is_an_error(scene: Scene) -> None:
    scene.run("a", 3)
    scene.graphs._entries["a"].graph.launch = failing(cuda_core_error())
    with pytest.raises(CudaError, match=r"^the CUDA graph of a step cannot be launched: LOST$"):
        scene.run("a")
