"""Holding back Ctrl-C while code of other packages runs that would swallow the ``KeyboardInterrupt``."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """Whether Ctrl-C is held back now, and whether there was one."""

    def __init__(self) -> None:
        #: Whether to hold the next Ctrl-C back. A second one is raised at once.
        self.hold = True
        #: Whether one is held back.
        self.held = False

    def check(self) -> None:
        """Raise ``KeyboardInterrupt`` if one was held back."""
        if self.held:
            raise KeyboardInterrupt

    def take(self) -> bool:
        """Take a Ctrl-C that has just arrived, and return whether it is held back."""
        take = self.hold and not self.held
        self.held |= take
        return take


@contextmanager
def held_interrupts() -> Iterator[Interrupts]:
    """Hold Ctrl-C back as long as the yielded object says so. One that is still held at the end is raised then."""
    interrupts = Interrupts()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield interrupts  # no signal arrives here, or none is wanted
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
