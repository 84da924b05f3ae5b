"""What TensorRT logs, collected."""

import logging

import pytest

from tests.helpers.tensorrt_modules import FakeLogger, fake_module
from trt_kvcache.errors import BuildError, EngineError
from trt_kvcache.trt.log import TensorRTLog

ERROR, WARNING, INFO = FakeLogger.Severity.ERROR, FakeLogger.Severity.WARNING, FakeLogger.Severity.INFO


@pytest.fixture
def log():
    return TensorRTLog(fake_module("1.0"))


def test_collects_once_from_warning_upwards(log):
    with log.collect() as messages:
        for severity, text in (
            (ERROR, " first \n"),
            (INFO, "chatter"),
            (WARNING, "careful"),
            (FakeLogger.Severity.INTERNAL_ERROR, "bug"),
            (ERROR, "first"),
        ):
            log.logger.log(severity, text)
    assert messages.errors == ["first", "bug"]
    assert messages.warnings == ["careful"]


def test_ends_with_its_block(log, caplog):
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


def test_check_and_fail(log):
    with log.collect() as messages:
        with pytest.raises(BuildError, match=r"the work. TensorRT says: nothing"):
            messages.fail(BuildError, "the work")
        log.logger.log(WARNING, "odd")
        messages.check(BuildError, "the work")  # a warning is no failure
        with pytest.raises(BuildError, match=r"^the work. TensorRT says: odd$"):
            messages.fail(BuildError, "the work")
        log.logger.log(ERROR, "bad")
        log.logger.log(ERROR, "worse")
        with pytest.raises(EngineError, match=r"^the work. TensorRT says: bad \| worse$"):
            messages.check(EngineError, "the work")
