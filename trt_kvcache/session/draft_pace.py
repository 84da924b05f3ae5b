"""``DraftPace``: the length of the drafts of a step that gives the most tokens per second, from acceptance and measured times."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from trt_kvcache.generation.drafting import Drafting

#: Lengths to choose from. A draft runs after one token, so these fill enqueues of 2, 4, 8 and 16.
LENGTHS = (0, 1, 3, 7, 15)

#: Time of a step with drafts over one without, where none is measured: to verify them, and to draft a token, which takes some time always.
_VERIFY, _DRAFT_TOKEN, _LEAST_DRAFT_TOKEN = 1.15, 0.05, 0.01

#: Times of a kind of step: the last ones, and at least so many. The first two of a shape run without a graph and capture one.
_WINDOW, _LEAST, _CAPTURES = 16, 3, 2
#: Steps after which times are forgotten: caches grow, and clocks change.
_LASTING = 512

#: Times of steps with drafts hold for up to so many times as many requests, and as few.
_NEAR = 2

#: Steps without drafts before one with drafts is tried, once drafts do not pay: at first, and at most.
_FIRST_PAUSE, _MAX_PAUSE = 8, 128


@dataclass
class _Times:
    """Seconds of the last steps with drafts of one length and one number of requests."""

    skipped: int  # of the next steps, so many are not counted
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    median: float = 0.0
    ends: int = 0  # the step after which they are forgotten

    def count(self, seconds: float, step: int) -> None:
        if self.skipped:
            self.skipped -= 1
            return
        if step > self.ends:
            self.seconds.clear()
        self.seconds.append(seconds)
        self.median, self.ends = median(self.seconds), step + _LASTING

    def is_known(self, step: int) -> bool:
        return len(self.seconds) >= _LEAST and step <= self.ends


class DraftPace:
    """Chooses the length of the drafts of a step, for all of its requests: what they draft costs little beside the longest draft.

    The length changes no token, only the time that they take. With ``measures=False`` times are assumed: on a CPU, steps take milliseconds
    of other programs too.
    """

    # The first steps are without drafts: the others are compared with them. Those after them have drafts of one token, which cost least.

    def __init__(self, *, measures: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self._measures, self._clock = measures, clock
        #: By length and number of requests: a step of several requests verifies more rows.
        self._times: dict[int, dict[int, _Times]] = {length: {} for length in LENGTHS}
        self._steps = 0
        self._last: tuple[int, float] | None = None  # requests and end of the last step
        self._pause = _FIRST_PAUSE
        self._tries_at: int | None = None  # the step that tries drafts; None while they pay

    def length(self, running: int, draftings: Sequence[Drafting]) -> int:
        """Return the length for the next step of ``running`` requests, of which these may have drafts; 0 for none."""
        seconds = self._seconds(running) if draftings else None
        if seconds is None:
            return 0
        others = running - len(draftings)
        speeds = {length: (others + sum(one.expected_tokens(length) for one in draftings)) / seconds[length] for length in seconds}
        best = max(speeds, key=lambda length: speeds[length])
        if best:
            self._pause, self._tries_at = _FIRST_PAUSE, None
            return best
        if self._tries_at is None:
            self._tries_at = self._steps + self._pause
        return int(self._steps >= self._tries_at)

    def count(self, running: int, length: int) -> None:
        """Count a step that ends now, with its time if the one before it was of as many requests. ``length``: of its longest draft."""
        self._steps += 1
        if length and self._tries_at is not None and self._steps > self._tries_at:
            self._pause = min(2 * self._pause, _MAX_PAUSE)
            self._tries_at = self._steps + self._pause
        if not self._measures:
            return
        last, self._last = self._last, (running, self._clock())
        if last is not None and last[0] == running:
            by_requests = self._times[next(most for most in LENGTHS if most >= length)]
            times = by_requests.setdefault(running, _Times(_CAPTURES if length else 0))
            times.count(self._last[1] - last[1], self._steps)

    def skip(self) -> None:
        """Note a step of requests without drafts, which is not counted."""
        self._last = None

    def _seconds(self, running: int) -> dict[int, float] | None:
        """Return the seconds of a step by length, measured or estimated; None if those without drafts are not known."""
        if not self._measures:
            return {length: _estimated(length, 1.0, _DRAFT_TOKEN) for length in LENGTHS}
        found = {length: known for length in LENGTHS if (known := self._known(length, running)) is not None}
        if 0 not in found:
            return None
        plain, seconds = found[0], {}
        if len(found) == 1:
            return {0: plain, 1: _estimated(1, plain, _DRAFT_TOKEN)}
        for length in LENGTHS:
            nearest = min((one for one in found if one), key=lambda one: abs(LENGTHS.index(one) - LENGTHS.index(length)))
            token = max((found[nearest] / plain - _VERIFY) / nearest, _LEAST_DRAFT_TOKEN)
            seconds[length] = found[length] if length in found else _estimated(length, plain, token)
        return seconds

    def _known(self, length: int, running: int) -> float | None:
        """Return the measured seconds of a step of this number of requests or the nearest one; with drafts, of one that is not far.

        Without drafts a step reads all weights and little else, however many requests it has.
        """
        known = {
            count: times.median
            for count, times in self._times[length].items()
            if times.is_known(self._steps) and (not length or running / _NEAR <= count <= running * _NEAR)
        }
        return known[min(known, key=lambda count: abs(count - running))] if known else None


def _estimated(length: int, plain: float, token: float) -> float:
    """Return the seconds of a step. ``token``: time to draft a token, over the time of a step without drafts."""
    return plain * (_VERIFY + token * length) if length else plain
