"""What TensorRT logs, collected."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.fake_tensorrt import FakeLogger, fake_module
from trt_kvcache.errors import BuildError, EngineError
from trt_kvcache.trt.log import TensorRTLog

ERROR, WARNING, INFO = FakeLogger.Severity.ERROR, FakeLogger.Severity.WARNING, FakeLogger.Severity.INFO
CUDA_35 = "[checkMacros.cpp::catchCudaError::250] Error Code 1: Cuda Runtime (cudaError 35: CUDA driver version is insufficient)"


@pytest.fixture
def log() -> TensorRTLog:
    return TensorRTLog(fake_module("1.0"))


def test_collects_from_warning_upwards(log: TensorRTLog) -> None:
    with log.collect() as messages:
        for severity, text in ((ERROR, " first \n"), (INFO, "chatter"), (WARNING, "careful"), (FakeLogger.Severity.INTERNAL_ERROR, "bug")):
            log.logger.log(severity, text)
    assert messages.errors == ["first", "bug"]
    assert messages.warnings == ["careful"]


def test_repeats_are_kept_once(log: TensorRTLog) -> None:
    with log.collect() as messages:
        for _ in range(3):
            log.logger.log(ERROR, "again")
    assert messages.errors == ["again"]


def test_collecting_ends_with_its_block(log: TensorRTLog, caplog: pytest.LogCaptureFixture) -> None:
    with log.collect() as outer:
        with log.collect() as inner:
            log.logger.log(ERROR, "one")
        log.logger.log(ERROR, "two")
    assert (inner.errors, outer.errors) == (["one"], ["one", "two"])
    with caplog.at_level(logging.WARNING, logger="trt_kvcache.tensorrt"):
        log.logger.log(ERROR, "nobody collects")
        log.logger.log(WARNING, "nor this")
    assert [(record.levelname, record.message) for record in caplog.records] == [("ERROR", "nobody collects"), ("WARNING", "nor this")]
    assert outer.errors == ["one", "two"]


def test_everything_is_logged_for_people(log: TensorRTLog, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="trt_kvcache.tensorrt"), log.collect():
        for severity, text in ((INFO, " chatter \n"), (FakeLogger.Severity.VERBOSE, "more"), (WARNING, "collected")):
            log.logger.log(severity, text)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "chatter"),
        ("DEBUG", "more"),
        ("INFO", "collected"),
    ]


def test_missing_driver_is_dropped_only_where_no_gpu_is_needed(log: TensorRTLog) -> None:
    with log.collect() as needed, log.collect(ignore_missing_driver=True) as not_needed:
        log.logger.log(ERROR, CUDA_35)
    assert needed.errors == [CUDA_35]
    assert not_needed.errors == []


def test_check_and_fail(log: TensorRTLog) -> None:
    with log.collect() as messages:
        log.logger.log(WARNING, "odd")
        messages.check(BuildError, "the work")  # a warning is no failure
        with pytest.raises(BuildError, match=r"^the work. TensorRT says: odd$"):
            messages.fail(BuildError, "the work")
        log.logger.log(ERROR, "bad")
        log.logger.log(ERROR, "worse")
        with pytest.raises(EngineError, match=r"^the work. TensorRT says: bad \| worse$"):
            messages.check(EngineError, "the work")


def test_the_exception_of_a_plugin_is_the_cause(log: TensorRTLog) -> None:
    with log.collect() as messages:
        log.receive_exception("Plugin.enqueue", reason := ValueError("seven rows"))
        log.logger.log(ERROR, "enqueue failed")
        with pytest.raises(
            EngineError, match=r"^the step. TensorRT says: Plugin\.enqueue: ValueError: seven rows \| enqueue failed$"
        ) as raised:
            messages.check(EngineError, "the step")
        assert raised.value.__cause__ is reason
        messages.begin_call()
        messages.check(EngineError, "the step")
        with pytest.raises(EngineError, match="nothing") as raised:
            messages.fail(EngineError, "the step")
        assert raised.value.__cause__ is None


def in_another_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_an_error_of_another_thread_is_a_warning_of_a_call(log: TensorRTLog) -> None:
    with log.collect() as messages:
        messages.begin_call()
        in_another_thread(lambda: log.logger.log(ERROR, "a kernel could not be compiled"))
        in_another_thread(lambda: log.receive_exception("Plugin.enqueue", ValueError("of another engine")))
        messages.check(EngineError, "the step")
        assert messages.warnings == ["a kernel could not be compiled", "Plugin.enqueue: ValueError: of another engine"]
        assert messages.cause is None
        log.logger.log(ERROR, "here")
        with pytest.raises(EngineError, match=r"^the step. TensorRT says: here$"):
            messages.check(EngineError, "the step")


def test_the_thread_of_a_call_is_not_that_of_the_collection(log: TensorRTLog) -> None:
    with log.collect() as messages:

        def call() -> None:
            messages.begin_call()
            log.logger.log(ERROR, "in the thread of the session")

        in_another_thread(call)
        assert messages.errors == ["in the thread of the session"]


def test_errors_of_all_threads_fail_a_build(log: TensorRTLog) -> None:
    with log.collect() as messages:
        in_another_thread(lambda: log.logger.log(ERROR, "in a thread of the builder"))
        with pytest.raises(BuildError, match="in a thread of the builder"):
            messages.check(BuildError, "the build")


def test_fail_without_a_message(log: TensorRTLog) -> None:
    with log.collect() as messages, pytest.raises(BuildError, match=r"the work. TensorRT says: nothing"):
        messages.fail(BuildError, "the work")


@pytest.mark.trt
def test_real_tensorrt_takes_the_logger() -> None:
    from trt_kvcache.trt.module import load

    rtx: Any = load("tensorrt_rtx")
    with rtx.log.collect(ignore_missing_driver=True) as messages:
        builder = rtx.module.Builder(rtx.log.logger)
        assert builder.build_serialized_network(builder.create_network(0), builder.create_builder_config()) is None
    assert any("at least one output" in text for text in messages.errors)
