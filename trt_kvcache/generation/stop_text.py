"""Stop texts in a stream: text that could still become a stop text is held back until it is certain."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import accumulate


class StopText:
    """Lets text through up to the first stop text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        #: Every text that a stop text begins with, the longest first.
        self._starts = tuple(sorted({start for stop in self._stops for start in accumulate(stop)}, key=len, reverse=True))
        self._held = ""
        #: Whether a stop text was found. Nothing is let through after it.
        self.stopped = False

    def push(self, text: str) -> str:
        """Take more text."""
        if self.stopped:
            return ""
        self._held += text
        found = [(place + len(stop), place) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            _, place = min(found)  # the one that is complete first, however the text was cut into pieces
            self.stopped = True
            certain, self._held = self._held[:place], ""
            return certain
        start = next((start for start in self._starts if self._held.endswith(start)), "")
        certain, self._held = self._held.removesuffix(start), start
        return certain

    def flush(self) -> str:
        """Return what was held back: the stream has ended, so it is no stop text."""
        held, self._held = self._held, ""
        return held

    def copy(self) -> StopText:
        """Return another one in the same state, which continues on its own."""
        return copy.copy(self)  # nothing that it has can be changed in place
