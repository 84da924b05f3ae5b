"""``EngineResources``: what an engine holds is released once, in reverse order, after the last step."""

from __future__ import annotations

import pytest

from tests.helpers.fake_tensorrt import FakeGpuMemory, FakeLogger, FakeStream, fake_module
from trt_kvcache.trt.engine_resources import EngineResources
from trt_kvcache.trt.log import TensorRTLog
from trt_kvcache.trt.module import TensorRT


@pytest.fixture
def tensorrt() -> TensorRT:
    module = fake_module("1.7.1")
    return TensorRT(module=module, flavour="tensorrt_rtx", version="1.7.1", log=TensorRTLog(module))


@pytest.fixture
def memory() -> FakeGpuMemory:
    return FakeGpuMemory()


@pytest.fixture
def resources(tensorrt: TensorRT, memory: FakeGpuMemory) -> EngineResources:
    return EngineResources(tensorrt, memory)


def test_allocations_live_until_close(resources: EngineResources, memory: FakeGpuMemory) -> None:
    resources.allocate(100, stream=memory.create_stream())
    resources.allocate(50, stream=memory.create_stream(), zeroed=True)
    assert memory.live_nbytes == 150
    resources.close()
    assert memory.live_nbytes == 0


def test_callbacks_are_called_in_reverse_order(resources: EngineResources) -> None:
    calls: list[int] = []
    for number in range(3):
        resources.callback(calls.append, number)
    resources.close()
    assert calls == [2, 1, 0]


def test_close_releases_everything_once(resources: EngineResources) -> None:
    calls: list[int] = []
    resources.callback(calls.append, 1)
    resources.close()
    resources.close()
    assert calls == [1]


def test_close_waits_for_the_last_enqueue(resources: EngineResources) -> None:
    first, last = FakeStream(1), FakeStream(2)
    resources.note_enqueue(first)
    resources.note_enqueue(last)
    resources.close()
    resources.close()
    assert (first.synced, last.synced) == (0, 1)


def test_close_does_not_wait_for_a_graph_builder(resources: EngineResources) -> None:
    resources.note_enqueue(object())
    resources.close()


def test_close_does_not_wait_for_a_closed_stream(resources: EngineResources) -> None:
    stream = FakeStream(1)
    stream.is_closed = True  # type: ignore[attr-defined]
    resources.note_enqueue(stream)
    resources.close()
    assert stream.synced == 0


def test_everything_is_released_even_if_the_wait_fails(
    resources: EngineResources, memory: FakeGpuMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(stream: object) -> None:
        raise RuntimeError("sticky CUDA error")

    resources.allocate(100, stream=memory.create_stream())
    resources.note_enqueue(FakeStream(1))
    monkeypatch.setattr(memory, "synchronize", broken)
    with pytest.raises(RuntimeError, match="sticky CUDA error"):
        resources.close()
    assert memory.live_nbytes == 0


def test_messages_are_collected_until_close(resources: EngineResources, tensorrt: TensorRT) -> None:
    tensorrt.log.logger.log(FakeLogger.Severity.WARNING, "first")
    resources.close()
    tensorrt.log.logger.log(FakeLogger.Severity.WARNING, "second")
    assert resources.messages.warnings == ["first"]
