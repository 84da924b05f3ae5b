"""``Pace``: the steps of a session in another thread run when a test lets them, so that nothing depends on how fast a machine is."""

from __future__ import annotations

import threading
import time
from typing import Any

from trt_kvcache import InferenceSession


class Pace:
    """Says whether a step may run. One that may not does nothing, so that what comes between two steps goes on.

    Steps run freely before :meth:`hold`.
    """

    def __init__(self) -> None:
        self._free = threading.Event()
        self._free.set()
        self._allowed = threading.Semaphore(0)
        self._seconds = 0.0

    def hold(self) -> Pace:
        """Let no step run from now on."""
        self._allowed = threading.Semaphore(0)
        self._free.clear()
        return self

    def allow(self, count: int) -> None:
        """Let so many steps run, while it holds the others."""
        for _ in range(count):
            self._allowed.release()

    def go(self) -> None:
        """Let all steps run."""
        self._free.set()

    def slow(self, seconds: float) -> None:
        """Have each step last so much longer."""
        self._seconds = seconds

    def may_step(self) -> bool:
        """Tell whether a step may run now; take it from those that were allowed."""
        time.sleep(self._seconds)
        if self._free.is_set() or self._allowed.acquire(blocking=False):
            return True
        time.sleep(0.001)
        return False

    def attach(self, session: InferenceSession) -> InferenceSession:
        """Pace this session, and return it."""
        step = session.step

        def paced() -> Any:
            return step() if self.may_step() else []

        session.step = paced  # type: ignore[method-assign]
        return session
