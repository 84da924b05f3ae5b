"""Stop texts in a stream: text that could still become a stop text is held back until it is certain."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Lets text through up to the first stop text.

    Parameters
    ----------
    stops : sequence of str
        Texts to stop at, none of them empty.

    Examples
    --------
    >>> from trt_kvcache.generation.stop_text import StopText
    >>> filter = StopText(["END"])
    >>> filter.push("one E"), filter.push("cho E"), filter.push("ND of it"), filter.stopped
    ('one ', 'Echo ', '', True)
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        #: Whether a stop text was found. Nothing is let through after it.
        self.stopped = False

    def push(self, text: str) -> str:
        """Take more text.

        Parameters
        ----------
        text : str
            Follows what was taken before.

        Returns
        -------
        str
            What is certain not to be part of a stop text; the rest is held back.
        """
        if self.stopped:
            return ""
        self._held += text
        found = [(place + len(stop), place) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            _, place = min(found)  # the one that is complete first, however the text was cut into pieces
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

    def copy(self) -> StopText:
        """Return another one in the same state, which continues on its own."""
        other = StopText(self._stops)
        other._held, other.stopped = self._held, self.stopped
        return other

    def _length_of_possible_start(self) -> int:
        """Return the length of the longest end of the held text that a stop text begins with."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
