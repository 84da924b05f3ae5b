"""Running one damaged file after another: which errors are ours, and what takes too long or too much memory."""

from __future__ import annotations

import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trt_kvcache._util.peak_memory import peak_memory_nbytes
from trt_kvcache.errors import KVCacheError

#: How long one file may take. Most take milliseconds; a busy machine is slower, a hang has no end.
SECONDS = 120


class TooSlow(BaseException):
    """A case hangs."""


@contextmanager
def time_limit(seconds: int = SECONDS) -> Iterator[None]:
    """Raise :class:`TooSlow` in the block after that time."""

    def stop(*_: object) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Findings:
    """What went wrong in a series of cases, by the seed of each."""

    def __init__(self, allowed: tuple[type[BaseException], ...] = (KVCacheError,)) -> None:
        self._allowed = allowed
        self._found: list[str] = []
        self.refused = self.accepted = 0

    def run(self, seed: object, call: Callable[[], Any]) -> None:
        """Run a case: it returns, or raises an error of ours."""
        try:
            with time_limit(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call()
        except self._allowed as error:
            self.refused += 1
            if len(str(error)) > 20_000:
                self._found.append(f"seed {seed}: a message of {len(str(error))} characters")
        except TooSlow:
            self._found.append(f"seed {seed}: still running after {SECONDS} s\n{traceback.format_exc(limit=-4)}")
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            self._found.append(f"seed {seed}: {type(error).__name__}\n{traceback.format_exc(limit=-4)}")
        else:
            self.accepted += 1

    def check(self) -> None:
        """Fail if there was one."""
        assert not self._found, f"{len(self._found)} of {self.refused + self.accepted + len(self._found)} cases:\n" + "\n".join(
            self._found[:5]
        )


def begin_peak() -> int:
    """Forget the peak of this process so far, where the system can (Linux), and return the new one, in bytes."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak_memory_nbytes() or 0


def peak_growth(before: int) -> int:
    """Return how much higher the peak is than ``begin_peak`` said, in bytes."""
    return (peak_memory_nbytes() or 0) - before
