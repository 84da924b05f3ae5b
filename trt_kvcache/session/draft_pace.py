"""``DraftPace``: compare the tokens per second of steps with drafts and without, as they run, and pause drafts that do not pay."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean, median

#: Steps that are compared: the last ones of each kind, and at least so many. A few of them capture a graph, or a prompt runs too.
_WINDOW, _LEAST_PLAIN, _LEAST_DRAFTED = 16, 3, 8
#: Steps without drafts after steps with drafts were slower: at first, and at most.
_FIRST_PAUSE, _MAX_PAUSE = 32, 512


@dataclass
class _Drafted:
    """Steps with drafts of one number of requests."""

    tokens: deque[int] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    pause: int = _FIRST_PAUSE
    left: int = 0

    def pay(self, plain_tokens_per_second: float) -> bool:
        """Tell whether they give as many tokens per second as other steps, or are too few to tell."""
        if len(self.seconds) < _LEAST_DRAFTED:
            return True
        return fmean(self.tokens) / median(self.seconds) >= plain_tokens_per_second


class DraftPace:
    """Says whether the next step may have drafts. It changes no token, only the time that they take."""

    # A step of several requests verifies more rows, so the answer depends on how many run. The first steps are without drafts: they are
    # what the others are compared with.

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        # Seconds of steps without drafts, by the number of requests.
        self._plain: dict[int, deque[float]] = {}
        self._drafted: dict[int, _Drafted] = {}
        self._last: tuple[int, float] | None = None  # requests and end of the last step

    def allows(self, running: int) -> bool:
        """Tell whether the next decode step, of ``running`` requests, may verify drafts. Call it once before each step."""
        drafted = self._drafted.setdefault(running, _Drafted())
        if drafted.left:
            drafted.left -= 1
            return False
        known = [count for count, seconds in self._plain.items() if len(seconds) >= _LEAST_PLAIN]
        if not known:
            return False
        # A step reads all weights however many requests it has.
        nearest = min(known, key=lambda count: abs(count - running))
        if drafted.pay(running / median(self._plain[nearest])):
            if len(drafted.seconds) == _WINDOW:
                drafted.pause = _FIRST_PAUSE
            return True
        self._drafted[running] = _Drafted(pause=min(2 * drafted.pause, _MAX_PAUSE), left=drafted.pause - 1)
        return False

    def count(self, running: int, tokens: int, *, drafted: bool) -> None:
        """Count a step that has ended now, from the end of the step before it if that was of as many requests."""
        last, self._last = self._last, (running, self._clock())
        if last is None or last[0] != running:
            return
        seconds = self._last[1] - last[1]
        if drafted:
            steps = self._drafted.setdefault(running, _Drafted())
            steps.tokens.append(tokens)
            steps.seconds.append(seconds)
        else:
            self._plain.setdefault(running, deque(maxlen=_WINDOW)).append(seconds)
