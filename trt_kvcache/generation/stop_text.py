"""Stop texts in a stream: what could still become one is held back until it is certain."""

from collections.abc import Sequence


class StopText:
    """Lets text through up to the first stop text.

    ``stops``: sequence of str. Not empty strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        #: Whether a stop text was met. Nothing is let through after it.
        self.stopped = False

    def push(self, text: str) -> str:
        """Take more text and return what is certain not to be part of a stop text."""
        if self.stopped:
            return ""
        self._held += text
        found = [(place + len(stop), place) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            _, place = min(found)  # the one that is complete first, however the text came in pieces
            self.stopped = True
            certain, self._held = self._held[:place], ""
            return certain
        keep = self._length_of_possible_start()
        certain, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return certain

    def flush(self) -> str:
        """Return what was held back: the stream has ended, so it is no stop text."""
        held, self._held = self._held, ""
        return held

    def _length_of_possible_start(self) -> int:
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
