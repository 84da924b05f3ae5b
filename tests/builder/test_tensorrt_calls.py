"""``require``: a call that gives an object, or an error with TensorRT's text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.fake_tensorrt import FakeLogger, fake_module
from trt_kvcache.builder.tensorrt_calls import require
from trt_kvcache.errors import BuildError
from trt_kvcache.trt.log import Messages, TensorRTLog


@pytest.fixture
def log() -> TensorRTLog:
    return TensorRTLog(fake_module("1.7.1"))


@pytest.fixture
def messages(log: TensorRTLog) -> Iterator[Messages]:
    with log.collect() as messages:
        yield messages


def test_what_the_call_returns(messages: Messages) -> None:
    assert require(lambda *arguments: arguments, messages, "the work", 1, 2) == (1, 2)


def test_an_object_that_is_false_is_an_object(messages: Messages) -> None:
    assert require(lambda: 0, messages, "the work") == 0


def test_none_is_a_failure(messages: Messages, log: TensorRTLog) -> None:
    log.logger.log(FakeLogger.Severity.ERROR, "out of memory")
    with pytest.raises(BuildError, match=r"^the work. TensorRT says: out of memory$"):
        require(lambda: None, messages, "the work")


@pytest.mark.parametrize("error", [TypeError, RuntimeError])
def test_an_exception_without_a_reason_is_a_failure(messages: Messages, log: TensorRTLog, error: type[Exception]) -> None:
    def call() -> Any:
        log.logger.log(FakeLogger.Severity.ERROR, "no such GPU")
        raise error("factory function returned nullptr")

    with pytest.raises(BuildError, match=r"^the work. TensorRT says: no such GPU$"):
        require(call, messages, "the work")
