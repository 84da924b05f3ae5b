"""What TensorRT logs, collected so that it can become the text of an exception.

TensorRT reports many errors in its log only: a call returns None or False, or even a layer that it will not honour. And it
keeps one logger per process, the first one it was given. So there is one :class:`TensorRTLog` per imported TensorRT, and
whoever makes a call opens a collection around it.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from trt_kvcache.errors import KVCacheError

#: In a text that TensorRT logs after an error on a machine without a driver. It says nothing about the error itself.
_MISSING_DRIVER = "cudaError 35"

#: Where a message goes that nobody collects.
_FALLBACK = logging.getLogger("trt_kvcache.tensorrt")


class Messages:
    """What TensorRT said while one collection was open, in order, without repeats.

    Parameters
    ----------
    ignore_missing_driver : bool
        Drop the "cudaError 35" that follows each error on a machine without a GPU. For work that needs no GPU only: where
        one is needed, that line is the reason.
    """

    def __init__(self, *, ignore_missing_driver: bool) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []
        self._ignore_missing_driver = ignore_missing_driver

    def add(self, text: str, *, is_error: bool) -> None:
        """Keep one message."""
        if self._ignore_missing_driver and _MISSING_DRIVER in text:
            return
        kept = self.errors if is_error else self.warnings
        if text not in kept:
            kept.append(text)

    def check(self, error: type[KVCacheError], what: str) -> None:
        """Raise ``error`` if TensorRT logged one, whatever its call returned."""
        if self.errors:
            self.fail(error, what)

    def fail(self, error: type[KVCacheError], what: str) -> NoReturn:
        """Raise ``error`` with ``what`` and all that TensorRT said: its errors, and its warnings if there is no error."""
        said = self.errors or self.warnings or ["nothing"]
        raise error(f"{what}. TensorRT says: {' | '.join(said)}")


class TensorRTLog:
    """The one logger of an imported TensorRT module. Messages below WARNING are dropped.

    Messages go to every collection that is open, from whatever thread they come: two builds at a time read each other's.

    Parameters
    ----------
    module : module
        ``tensorrt`` or ``tensorrt_rtx``.

    Attributes
    ----------
    logger : ILogger
        To be given to each ``Builder`` and ``Runtime``.
    """

    def __init__(self, module: Any) -> None:
        self._open: list[Messages] = []
        self._lock = threading.Lock()
        self.logger = _make_logger(module, self)

    @contextmanager
    def collect(self, *, ignore_missing_driver: bool = False) -> Iterator[Messages]:
        """Collect what is logged until the end of the ``with`` block."""
        messages = Messages(ignore_missing_driver=ignore_missing_driver)
        with self._lock:
            self._open.append(messages)
        try:
            yield messages
        finally:
            with self._lock:
                self._open.remove(messages)

    def receive(self, text: str, *, is_error: bool) -> None:
        """Hand a message to the open collections, or to Python's logging where there is none."""
        with self._lock:
            for messages in self._open:
                messages.add(text, is_error=is_error)
            collected = bool(self._open)
        if not collected:
            _FALLBACK.log(logging.ERROR if is_error else logging.WARNING, "%s", text)


def _make_logger(module: Any, log: TensorRTLog) -> Any:
    severity = module.ILogger.Severity

    class Logger(module.ILogger):  # type: ignore[misc]  # TensorRT is not imported when this is checked
        def __init__(self) -> None:
            module.ILogger.__init__(self)

        def log(self, level: Any, text: str) -> None:
            if int(level) <= int(severity.WARNING):
                log.receive(text.strip(), is_error=int(level) <= int(severity.ERROR))

    return Logger()
