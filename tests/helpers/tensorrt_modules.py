"""Stand-ins for the modules ``tensorrt`` and ``tensorrt_rtx``: as much of them as an import, a logger and a runtime take."""

from __future__ import annotations

import enum
from types import ModuleType
from typing import Any


class FakeLogger:
    """The base class of TensorRT's loggers."""

    class Severity(enum.IntEnum):
        INTERNAL_ERROR = 0
        ERROR = 1
        WARNING = 2
        INFO = 3
        VERBOSE = 4


def fake_module(version: str, *, start: bool = True, log: str = "CUDA initialization failure with error: 35") -> ModuleType:
    """Return a module of this version. With ``start=False`` its runtime logs ``log`` and cannot be created."""
    module: Any = ModuleType("tensorrt")
    module.__version__ = version
    module.ILogger = FakeLogger

    class Runtime:
        def __init__(self, logger: Any) -> None:
            if not start:
                logger.log(FakeLogger.Severity.ERROR, log)
                raise TypeError("pybind11::init(): factory function returned nullptr")

    module.Runtime = Runtime
    return module
