"""One call at a time: a session notices when a second thread uses it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

from trt_kvcache.errors import ThreadError

_Method = TypeVar("_Method", bound=Callable[..., Any])


class SingleUser:
    """Guard of an object that one thread may use at a time."""

    __slots__ = ("_what", "acquire", "release")

    def __init__(self, what: str) -> None:
        lock = threading.RLock()
        self._what = what
        self.acquire = lock.acquire
        self.release = lock.release

    def refusal(self) -> ThreadError:
        """Return the error to raise where ``acquire`` has returned False."""
        return ThreadError(
            f"{self._what}: expected calls from one thread at a time, but another thread is in a call. Nothing was changed. "
            "Use AsyncSession, or a session for each thread."
        )


def exclusive(method: _Method) -> _Method:
    """Return a method that raises :class:`ThreadError` while another thread is in one. The object has a ``SingleUser`` as ``_user``."""

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        user: SingleUser = self._user
        if not user.acquire(False):
            raise user.refusal()
        try:
            return method(self, *arguments, **options)
        finally:
            user.release()

    return cast(_Method, call)
