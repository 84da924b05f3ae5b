"""``DraftPace``: the length of the drafts of a step that gives the most tokens per second, from acceptance and measured times."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from trt_kvcache.generation.drafting import Drafting

#: Lengths to choose from. A draft runs after one token, so these fill enqueues of 2, 4, 8 and 16.
LENGTHS = (0, 1, 3, 7, 15)

#: Time of a step with drafts over one without, where none is measured: to verify them, and to draft a token.
_VERIFY, _DRAFT_TOKEN = 1.15, 0.05

#: Times of a kind of step: the last ones, and at least so many. The first two of a shape run without a graph and capture one.
_WINDOW, _LEAST, _CAPTURES = 16, 3, 2
#: Steps after which times are forgotten: caches grow, and clocks change; and steps for which one answer is kept.
_LASTING, _KEPT = 512, 8

#: Times of steps with drafts hold for up to so many times as many requests, and as few.
_NEAR = 2

#: Steps without drafts before one with drafts is tried, once drafts do not pay: at first, and at most.
_FIRST_PAUSE, _MAX_PAUSE = 8, 128


@dataclass
class _Times:
    """Seconds of the last steps with drafts of one length and one number of requests."""

    skipped: int  # of the next steps, so many are not counted
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    ends: int = 0  # the step after which they are forgotten

    def count(self, seconds: float, step: int) -> None:
        if self.skipped:
            self.skipped -= 1
            return
        if step > self.ends:
            self.seconds.clear()
        self.seconds.append(seconds)
        self.ends = step + _LASTING

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
        self._answers: dict[int, dict[int, float]] = {}  # seconds by length, by number of requests
        self._steps = 0
        self._last: tuple[int, float] | None = None  # requests and end of the last step
        self._pause = _FIRST_PAUSE
        self._tries_at: int | None = None  # the step that tries drafts; None while they pay
        self._tried = 1  # place in LENGTHS of the drafts that are tried

    def length(self, running: int, draftings: Sequence[Drafting]) -> int:
        """Return the length for the next step of ``running`` requests, of which these may have drafts; 0 for none."""
        seconds = self._seconds(running) if draftings else {}
        if not seconds:
            return 0
        others = running - len(draftings)
        best, most = 0, 0.0
        for length, one in seconds.items():
            speed = (others + sum([drafting.expected_tokens(length) for drafting in draftings])) / one
            if speed > most:
                best, most = length, speed
        if best:
            self._pause, self._tries_at, self._tried = _FIRST_PAUSE, None, 1
            return best
        if self._tries_at is None:
            self._tries_at = self._steps + self._pause
        return LENGTHS[self._tried] if self._steps >= self._tries_at else 0

    def count(self, running: int, tokens: int, length: int) -> None:
        """Count a step that ends now, with its time if the one before it was of as many requests. ``length``: of its longest draft."""
        self._steps += 1
        if length and self._tries_at is not None and self._steps > self._tries_at:
            self._count_try(is_hit=tokens >= running * (1 + length))
        if not self._measures:
            return
        last, self._last = self._last, (running, self._clock())
        if last is not None and last[0] == running:
            by_requests = self._times[next(most for most in LENGTHS if most >= length)]
            times = by_requests.setdefault(running, _Times(_CAPTURES if length else 0))
            times.count(self._last[1] - last[1], self._steps)
            if len(times.seconds) <= _LEAST:
                self._answers.clear()
        if not self._steps % _KEPT:
            self._answers.clear()

    def _count_try(self, *, is_hit: bool) -> None:
        """Try a longer draft at once after a hit, and one token after a pause otherwise."""
        if is_hit:
            self._pause, self._tries_at, self._tried = _FIRST_PAUSE, self._steps, min(self._tried + 1, len(LENGTHS) - 1)
        else:
            self._pause = min(2 * self._pause, _MAX_PAUSE)
            self._tries_at, self._tried = self._steps + self._pause, 1

    def skip(self) -> None:
        """Note a step of requests without drafts, which is not counted."""
        self._last = None

    def _seconds(self, running: int) -> dict[int, float]:
        """Return the seconds of a step by length, measured or estimated; nothing if those without drafts are not known."""
        found = self._answers.get(running)
        if found is None:
            found = self._answers[running] = self._measured(running) if self._measures else _estimated({0: 1.0})
        return found

    def _measured(self, running: int) -> dict[int, float]:
        known = {length: one for length in LENGTHS if (one := self._known(length, running)) is not None}
        if len(known) > 1 or 0 not in known:
            return _estimated(known) if 0 in known else {}
        return {length: _estimated(known)[length] for length in LENGTHS[:2]}

    def _known(self, length: int, running: int) -> float | None:
        """Return the measured seconds of a step of this number of requests or the nearest one; with drafts, of one that is not far.

        Without drafts a step reads all weights and little else, however many requests it has.
        """
        known = {
            count: times
            for count, times in self._times[length].items()
            if times.is_known(self._steps) and (not length or running / _NEAR <= count <= running * _NEAR)
        }
        return median(known[min(known, key=lambda count: abs(count - running))].seconds) if known else None


def _estimated(known: Mapping[int, float]) -> dict[int, float]:
    """Return the seconds of a step by length. An unknown length gets a short time, so that it is tried and measured if it may pay."""
    plain, seconds = known[0], dict(known)
    drafted = sorted(length for length in known if length)
    token = _DRAFT_TOKEN * plain
    for length in LENGTHS[1:]:
        if length not in known:
            shorter = [one for one in drafted if one < length]
            first, start = (shorter[-1], known[shorter[-1]]) if shorter else (0, _VERIFY * plain)
            if len(shorter) == len(drafted) > 1:  # two measured ones tell how long a token takes
                second = shorter[-2]
                token = max(token, (start - known[second]) / (first - second))
            longer = [known[one] for one in drafted if one > length]
            seconds[length] = min([start + token * (length - first), *longer])
    return seconds
