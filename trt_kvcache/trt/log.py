"""TensorRT's log, collected so that its messages can become the text of an exception.

TensorRT reports many errors in its log only: the call returns None or False, or it returns a layer and ignores its settings. It also
keeps one logger per process, the first one. So there is one :class:`TensorRTLog` per imported TensorRT module, and the caller of
TensorRT collects the messages of that call.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from trt_kvcache.errors import KVCacheError

#: Part of a message that TensorRT logs after each error on a machine without a driver. It does not explain the error itself.
_MISSING_DRIVER = "cudaError 35"

#: Everything that TensorRT logs, for people. Collected messages are logged at INFO: their collector decides how severe they are.
_LOGGER = logging.getLogger("trt_kvcache.tensorrt")


class Messages:
    """The messages of one collection, in order and without repeats.

    ``ignore_missing_driver`` drops the "cudaError 35" that follows each error on a machine without a GPU; for builds alone.
    """

    def __init__(self, *, ignore_missing_driver: bool) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []
        self.cause: Exception | None = None
        self._thread: int | None = None  # of the call, None while errors of all threads count
        self._ignore_missing_driver = ignore_missing_driver

    def add(self, text: str, *, is_error: bool) -> None:
        """Keep a message, unless the same one was kept before."""
        if self._ignore_missing_driver and _MISSING_DRIVER in text:
            return
        kept = self.errors if is_error else self.warnings
        if text not in kept:
            kept.append(text)

    def clear_errors(self) -> None:
        """Discard the errors, and the exception of a plugin, of earlier calls."""
        self.errors.clear()
        self.cause = None

    def begin_call(self) -> None:
        """Discard errors of earlier calls, and take only those of the calling thread: TensorRT for RTX compiles, and logs, in others."""
        self.clear_errors()
        self._thread = threading.get_ident()

    @property
    def takes_errors(self) -> bool:
        """True if an error that is logged now fails what the messages are collected for; else it is a warning."""
        return self._thread in (None, threading.get_ident())

    @property
    def text(self) -> str:
        """All errors that TensorRT logged, else its warnings."""
        return f"TensorRT says: {' | '.join(self.errors or self.warnings or ['nothing'])}"

    def check(self, error: type[KVCacheError], what: str) -> None:
        """Raise an exception if TensorRT logged an error, whatever its call returned."""
        if self.errors:
            self.fail(error, what)

    def fail(self, error: type[KVCacheError], what: str) -> NoReturn:
        """Raise ``error`` with all errors that TensorRT logged, else its warnings. The exception of a plugin is its ``__cause__``."""
        raise error(f"{what}. {self.text}") from self.cause


class TensorRTLog:
    """The one logger of an imported TensorRT module. A message goes to every open collection, whatever its thread.

    Builders log in threads of their own; after :meth:`Messages.begin_call`, errors of other threads are warnings.
    """

    def __init__(self, module: Any) -> None:
        self._open: list[Messages] = []
        self._lock = threading.Lock()
        self.logger = _make_logger(module, self)

    @contextmanager
    def collect(self, *, ignore_missing_driver: bool = False) -> Iterator[Messages]:
        """Collect messages until the end of the ``with`` block."""
        messages = Messages(ignore_missing_driver=ignore_missing_driver)
        with self._lock:
            self._open.append(messages)
        try:
            yield messages
        finally:
            with self._lock:
                self._open.remove(messages)

    def receive(self, text: str, *, is_error: bool) -> None:
        """Pass a message to the open collections, and to Python's logging: at its own level only if there is no collection."""
        with self._lock:
            for messages in self._open:
                messages.add(text, is_error=is_error and messages.takes_errors)
            collected = bool(self._open)
        level = logging.INFO if collected else logging.ERROR if is_error else logging.WARNING
        _LOGGER.log(level, "%s", text)

    def receive_exception(self, where: str, error: Exception) -> None:
        """Pass the exception of a plugin to the open collections: TensorRT prints it, and logs only that the call failed."""
        with self._lock:
            for messages in self._open:
                if messages.takes_errors:
                    messages.cause = error
        self.receive(f"{where}: {type(error).__name__}: {error}", is_error=True)


def _make_logger(module: Any, log: TensorRTLog) -> Any:
    """Return an ``ILogger`` that passes its messages to ``log``."""
    severity = module.ILogger.Severity

    class Logger(module.ILogger):  # type: ignore[misc]  # TensorRT is not imported when this is checked
        def __init__(self) -> None:
            module.ILogger.__init__(self)

        def log(self, level: Any, text: str) -> None:
            if int(level) <= int(severity.WARNING):
                log.receive(text.strip(), is_error=int(level) <= int(severity.ERROR))
            else:
                _LOGGER.log(logging.INFO if int(level) <= int(severity.INFO) else logging.DEBUG, "%s", text.strip())

    return Logger()
