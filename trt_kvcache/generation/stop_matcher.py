"""Stop texts in a stream: text that could still become a stop text is held back until that is certain."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class StopState(NamedTuple):
    """Progress of a :class:`StopMatcher`: a value, never changed in place."""

    #: Text that a stop text begins with, at the end of the stream so far.
    held: str = ""
    #: A stop text was found. No text is released after it.
    stopped: bool = False


class StopMatcher:
    """Releases text up to the first stop text (``stops``: none of them empty)."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        #: All beginnings of the stop texts, the longest first.
        self._prefixes = tuple(sorted({prefix for stop in self._stops for prefix in accumulate(stop)}, key=len, reverse=True))

    def push(self, state: StopState, text: str) -> tuple[str, StopState]:
        """Return the text that is released once ``text`` follows, and the state after it."""
        if state.stopped:
            return "", state
        text = state.held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start = min(found)  # the text that is complete first, independent of how tokens cut it
            return text[:start], StopState(stopped=True)
        held = next((prefix for prefix in self._prefixes if text.endswith(prefix)), "")
        return text.removesuffix(held), StopState(held)
