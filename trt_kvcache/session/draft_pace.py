"""``DraftPace``: the limit for the drafts of a step that gives the most tokens per second, from acceptance and measured times."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from trt_kvcache.generation.drafting import Drafting

#: Lengths to choose from. A draft runs after one token, so these fill enqueues of 2, 4, 8 and 16.
LENGTHS = (0, 1, 3, 7, 15)

#: Time of a step with drafts over one without, where none is measured: to verify them, and to draft a token.
_VERIFY, _DRAFT_TOKEN = 1.15, 0.05

#: Times of a kind of step: the last ones, and at least so many. The first two of a shape run without a graph and capture one.
_WINDOW, _LEAST, _CAPTURES = 16, 3, 2
#: Steps after which the times of a kind are forgotten, unless there are new ones: caches grow, and clocks change. While drafts pay no step
#: is without them, so a wrong time of these would last.
_LASTING, _PLAIN_LASTING = 512, 128
#: Steps for which estimates are kept.
_KEPT = 8

#: Times hold for up to twice, and down to half, as many requests.
_NEAR = 2

#: No step is taken to be shorter: a clock may stand still.
_LEAST_SECONDS = 1e-6

#: Steps without drafts before one with drafts is tried, once drafts do not pay: at first, and at most.
_FIRST_PAUSE, _MAX_PAUSE = 8, 128


class VerifiedDrafts(NamedTuple):
    """Drafted tokens of a step (of a tree those of its longest path), the accepted ones, and those of the longest draft."""

    proposed: int = 0
    accepted: int = 0
    depth: int = 0


@dataclass
class _Times:
    """Seconds of the last steps with drafts of one length and one number of requests."""

    skipped: int  # of the next steps, so many are not counted
    lasting: int
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    ends: int = 0  # the step after which they are forgotten

    def count(self, seconds: float, step: int, *, has_prompt: bool) -> None:
        if self.skipped:
            self.skipped -= 1
            return
        if has_prompt and self.is_known(step):  # it says less than others, but more than nothing
            return
        if step > self.ends:
            self.seconds.clear()
        self.seconds.append(seconds)
        self.ends = step + self.lasting

    def is_known(self, step: int) -> bool:
        return len(self.seconds) >= _LEAST and step <= self.ends


class DraftPace:
    """Chooses a limit for the drafts of each step, one for all requests: the time of a step depends on its longest draft.

    The limit changes the time, not the tokens. With ``measures=False`` times are assumed.
    """

    # The first steps are without drafts: the others are compared with them. Those after them have drafts of one token, which cost least.
    # On a CPU nothing is measured, because steps take milliseconds of other programs too.

    def __init__(self, *, measures: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self._measures, self._clock = measures, clock
        #: By length and number of requests: a step of several requests verifies more rows.
        self._times: dict[int, dict[int, _Times]] = {length: {} for length in LENGTHS}
        self._estimates: dict[int, dict[int, float]] = {}  # seconds by length, by number of requests
        self._steps = 0
        self._last: tuple[int, float] | None = None  # requests and end of the last step
        self._pause = self._tries_at = _FIRST_PAUSE  # the second one: the step that may try drafts although they do not pay
        self._tried = 1  # place in LENGTHS of the drafts that are tried

    def limit(self, running: int, draftings: Sequence[Drafting]) -> int:
        """Return the limit that is fastest for the next step of ``running`` requests, of which these may have drafts; 0 for no drafts."""
        fastest, limit = 0.0, 0
        for length, seconds in self._seconds(running).items() if draftings else ():
            tokens = running - len(draftings) + sum([drafting.expected_tokens(length) for drafting in draftings])
            if tokens / seconds > fastest:
                fastest, limit = tokens / seconds, length
        return limit

    def try_limit(self, running: int) -> int:
        """Return the limit of drafts that are tried in the next step although they do not pay; 0 for no try."""
        seconds = self._seconds(running) if self._steps >= self._tries_at else {}
        # They would pay if all of their tokens were accepted.
        limits = [length for length in LENGTHS[1:] if length in seconds and (1 + length) * seconds[0] > seconds[length]]
        return next((length for length in limits if length >= LENGTHS[self._tried]), max(limits, default=0))

    def pay(self, running: int, drafts: Sequence[tuple[Drafting, int]]) -> bool:
        """Tell whether a step that verifies these drafts is faster than one without. Each has a length. Others have proposed none."""
        seconds = self._seconds(running)
        tokens = running - len(drafts) + sum([drafting.expected_tokens(length) for drafting, length in drafts])
        longest = _class_of(max(length for _, length in drafts))
        return longest in seconds and tokens * seconds[0] >= running * seconds[longest]

    def count(self, running: int, drafts: VerifiedDrafts, *, tried: bool = False, has_prompt: bool = False) -> None:
        """Count a step that ends now, with its time if the one before it was of as many requests.

        ``tried``: by :meth:`try_limit`. ``has_prompt``: a prompt, or a part of one, ran since that step.
        """
        self._steps += 1
        if drafts.depth:
            self._count_drafts(drafts, tried=tried)
        if not self._measures:
            return
        last, self._last = self._last, (running, self._clock())
        if last is not None and last[0] == running:
            kind = (_CAPTURES, _LASTING) if drafts.depth else (0, _PLAIN_LASTING)
            times = self._times[_class_of(drafts.depth)].setdefault(running, _Times(*kind))
            times.count(max(self._last[1] - last[1], _LEAST_SECONDS), self._steps, has_prompt=has_prompt)
            if len(times.seconds) <= _LEAST:
                self._estimates.clear()
        if not self._steps % _KEPT:
            self._estimates.clear()

    def _count_drafts(self, drafts: VerifiedDrafts, *, tried: bool) -> None:
        """Set the next try: a longer one at once after drafts that were accepted as a whole, a short one after a pause otherwise."""
        is_whole = drafts.accepted == drafts.proposed and drafts.depth >= LENGTHS[self._tried]
        if not tried:
            self._pause = _FIRST_PAUSE
        elif not is_whole:
            self._pause = min(2 * self._pause, _MAX_PAUSE)
        self._tries_at = self._steps + (0 if is_whole else self._pause)
        self._tried = min(self._tried + 1, len(LENGTHS) - 1) if is_whole else 1

    def skip(self) -> None:
        """Note a step that is not counted."""
        self._last = None

    def _seconds(self, running: int) -> dict[int, float]:
        """Return the seconds of a step by length, measured or estimated; nothing if those without drafts are not known."""
        found = self._estimates.get(running)
        if found is None:
            found = self._estimates[running] = self._measured(running) if self._measures else _estimated({0: 1.0})
        return found

    def _measured(self, running: int) -> dict[int, float]:
        known = {length: one for length in LENGTHS if (one := self._known(length, running)) is not None}
        if 0 not in known:
            return {}
        seconds = _estimated(known)
        return seconds if len(known) > 1 else {length: seconds[length] for length in LENGTHS[:2]}

    def _known(self, length: int, running: int) -> float | None:
        """Return the measured seconds of a step of this number of requests or the nearest one that is not far."""
        known = {
            requests: times
            for requests, times in self._times[length].items()
            if times.is_known(self._steps) and running / _NEAR <= requests <= running * _NEAR
        }
        return median(known[min(known, key=lambda requests: abs(requests - running))].seconds) if known else None


def _class_of(length: int) -> int:
    """Return the length of LENGTHS with which the time of a draft is kept."""
    return next((one for one in LENGTHS if one >= length), LENGTHS[-1])


def _estimated(known: Mapping[int, float]) -> dict[int, float]:
    """Return the seconds of a step by length. An unknown length gets a short time, so that it is tried and measured if it may pay."""
    plain, seconds = known[0], dict(known)
    drafted = sorted(length for length in known if length)
    slope = 0.0  # seconds for each token, past the two longest that are measured
    if len(drafted) > 1:
        slope = (known[drafted[-1]] - known[drafted[-2]]) / (drafted[-1] - drafted[-2])
    for length in LENGTHS[1:]:
        if length not in known:
            shorter = [one for one in drafted if one < length]
            first, start = (shorter[-1], known[shorter[-1]]) if shorter else (0, _VERIFY * plain)
            token = max(_DRAFT_TOKEN * plain, slope if len(shorter) == len(drafted) else 0.0)
            longer = [known[one] for one in drafted if one > length]
            seconds[length] = min([start + token * (length - first), *longer])
    return seconds
