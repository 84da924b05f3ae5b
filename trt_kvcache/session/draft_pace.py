"""``DraftPace``: compare the tokens per second of steps with drafts and without, as they run, and pause drafts that do not pay."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean, median

#: Steps that are compared: the last ones of each kind. Those in which a graph is captured, or a prompt runs too, are few of them.
_WINDOW, _LEAST = 8, 4
#: Steps without drafts after steps with drafts were slower: at first, and at most.
_FIRST_PAUSE, _MAX_PAUSE = 32, 512


@dataclass
class _Steps:
    """The last steps of one kind: tokens that were chosen in each, and its seconds."""

    tokens: deque[int] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    @property
    def are_enough(self) -> bool:
        return len(self.seconds) >= _LEAST

    @property
    def tokens_per_second(self) -> float:
        return fmean(self.tokens) / max(median(self.seconds), 1e-9)

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens.append(tokens)
        self.seconds.append(seconds)


@dataclass
class _Batch:
    """Steps of one number of requests, for which drafts pay or not."""

    plain: _Steps = field(default_factory=_Steps)
    drafted: _Steps = field(default_factory=_Steps)
    pause: int = _FIRST_PAUSE
    left: int = 0


class DraftPace:
    """Says whether the next step may have drafts. It changes no token, only the time that they take.

    A step of several requests verifies more rows, so the answer depends on how many run. The first steps are without drafts: they are
    what the others are compared with.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._batches: dict[int, _Batch] = {}
        self._last: tuple[int, float] | None = None  # running requests and end of the last step

    def allows(self, running: int) -> bool:
        """Tell whether the next step of so many requests may have drafts. To be asked once a step."""
        batch = self._batches.setdefault(running, _Batch())
        if batch.left:
            batch.left -= 1
            return False
        if not batch.drafted.are_enough:
            return batch.plain.are_enough
        if batch.drafted.tokens_per_second >= batch.plain.tokens_per_second:
            batch.pause = _FIRST_PAUSE
            return True
        batch.left, batch.pause = batch.pause - 1, min(2 * batch.pause, _MAX_PAUSE)
        batch.drafted = _Steps()
        return False

    def count(self, running: int, tokens: int, *, drafted: bool) -> None:
        """Count a step that has ended now, from the end of the step before it if that was of as many requests."""
        last, self._last = self._last, (running, self._clock())
        if last is not None and last[0] == running:
            batch = self._batches.setdefault(running, _Batch())
            (batch.drafted if drafted else batch.plain).add(tokens, self._last[1] - last[1])
