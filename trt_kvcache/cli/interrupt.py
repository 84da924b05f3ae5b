"""Deferring Ctrl-C during code that would lose the ``KeyboardInterrupt``.

Such code is an import, which may raise ``ImportError`` instead, or a callback of TensorRT.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """Control of a deferred Ctrl-C. Set ``hold``; call ``check`` at points where it may be raised."""

    def __init__(self) -> None:
        #: True defers the next Ctrl-C. A second one is raised immediately.
        self.hold = True
        #: True if one is deferred.
        self.held = False

    def check(self) -> None:
        """Raise ``KeyboardInterrupt`` if one was deferred."""
        if self.held:
            raise KeyboardInterrupt

    def take(self) -> bool:
        """Handle a Ctrl-C; return True if it is deferred."""
        take = self.hold and not self.held
        self.held |= take
        return take


@contextmanager
def held_interrupts() -> Iterator[Interrupts]:
    """Defer Ctrl-C while ``hold`` of the yielded object is true, at most until the end of the block."""
    interrupts = Interrupts()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield interrupts  # this thread gets no signals, or they are ignored
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if not interrupts.take():
            before(number, frame)

    signal.signal(signal.SIGINT, handle)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
        interrupts.check()
