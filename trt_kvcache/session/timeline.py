"""``Timeline``: activity of the slots of a session over time, recorded by its request queue, and a picture of it."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trt_kvcache.plot import INK, LEGEND, Plot, draw
from trt_kvcache.session.model_location import expanded

#: Activity of a request in a step.
Activity = Literal["prefill", "decode"]

#: Colours of requests, given in turn: the same hue for prefill (dark) and decode (light).
_HUES = [
    ("#1b4f72", "#7fb3d5"),
    ("#78400f", "#e59866"),
    ("#145a32", "#7dcea0"),
    ("#512e5f", "#bb8fce"),
    ("#7b241c", "#d98880"),
    ("#0e6251", "#76d7c4"),
    ("#7d6608", "#f0d264"),
    ("#4d5656", "#b2babb"),
]
_MAX_NAMED_SLOTS = 40


@dataclass(frozen=True)
class SlotSpan:
    """Uninterrupted activity of one request in one slot."""

    slot: int
    request: int
    activity: Activity
    begin: float
    end: float


@dataclass(frozen=True)
class SlotMove:
    """A request that compaction moved to another slot."""

    at: float
    request: int
    source: int
    target: int


class Timeline:
    """Activities of the slots of a session over time. ``InferenceSession.record`` makes one.

    Parameters
    ----------
    clock : callable
        Returns seconds.

    Notes
    -----
    A step adds a few numbers for each active slot; steps of the same activity of a request become one span, so a long run takes little
    memory. Everything is in host memory.

    Examples
    --------
    >>> from trt_kvcache import InferenceSession
    >>> with InferenceSession.from_model("examples/tiny-llama", engine="numpy", max_batch_size=2) as session:
    ...     with session.record() as timeline:
    ...         _ = session.complete([[5, 6, 7]] * 3, max_new_tokens=4, ignore_eos=True)
    >>> sorted({span.request for span in timeline.spans})
    [0, 1, 2]
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started = clock()
        self._moves: list[SlotMove] = []
        self._waiting: list[tuple[float, int]] = []
        self._done: list[SlotSpan] = []
        self._open: dict[int, SlotSpan] = {}  # by slot
        self._stopped = False

    def stop(self) -> None:
        """End the recording and keep it. A ``with`` block calls this at its end."""
        self._stopped = True

    def __enter__(self) -> "Timeline":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"Timeline({len(self._done) + len(self._open)} spans, {len(self._moves)} moves)"

    @property
    def spans(self) -> tuple[SlotSpan, ...]:
        """Activities, in the order of their beginning."""
        return tuple(sorted((*self._done, *self._open.values()), key=lambda span: (span.begin, span.slot)))

    @property
    def moves(self) -> tuple[SlotMove, ...]:
        """Moves of compactions, in order."""
        return tuple(self._moves)

    @property
    def waiting(self) -> tuple[tuple[float, int], ...]:
        """Numbers of waiting requests, with the seconds since the beginning: of the first step, and of each that changed the number."""
        return tuple(self._waiting)

    def now(self) -> float:
        """Return the seconds since the recording began.

        Returns
        -------
        float
            Seconds, measured by the clock.
        """
        return self._clock() - self._started

    def record_step(self, begin: float, slots: Sequence[tuple[int, Activity] | None], waiting: int) -> None:
        """Record a step that has just ended.

        Parameters
        ----------
        begin : float
            Result of :meth:`now` before the step.
        slots : sequence of (int, str) or None
            For each slot the request that advanced in it, and what it did; None for a slot that did not advance.
        waiting : int
            Requests that wait for a slot.
        """
        if self._stopped:
            return
        end = self.now()
        for slot, given in enumerate(slots):
            if given is None:
                continue
            request, activity = given
            last = self._open.get(slot)
            if last is not None and (last.request, last.activity) == (request, activity):
                self._open[slot] = SlotSpan(slot, request, activity, last.begin, end)
                continue
            if last is not None:
                self._done.append(last)
            self._open[slot] = SlotSpan(slot, request, activity, begin, end)
        if not self._waiting or self._waiting[-1][1] != waiting:
            self._waiting.append((end, waiting))

    def record_moves(self, requests: Sequence[int], mapping: Sequence[int]) -> None:
        """Record a compaction.

        Parameters
        ----------
        requests : sequence of int
            The request of each slot before it.
        mapping : sequence of int
            For each slot its new one; -1 for one that is dropped.
        """
        if self._stopped:
            return
        at = self.now()
        for source, (request, target) in enumerate(zip(requests, mapping, strict=True)):
            if target == source:
                continue
            if source in self._open:
                self._done.append(self._open.pop(source))
            if target >= 0:
                self._moves.append(SlotMove(at, request, source, target))

    def plot(self, path: str | os.PathLike[str] | None = None, *, title: str = "Slots over time") -> Plot:
        """Draw the recording.

        Parameters
        ----------
        path : path, optional
            Save the picture there too: a name that ends with ``.svg``, ``.png`` or ``.pdf``.
        title : str
            The title.

        Returns
        -------
        Plot
            Above a lane for each slot: a request's prefill dark, its decode steps light, where it was admitted, and where compaction
            moved it. The number in a bar is the index of its request. Below how many requests have a slot and how many wait for one.

        Raises
        ------
        ModuleNotFoundError
            matplotlib is not installed.
        ConfigError, OSError
            The file cannot be written, or its name has another ending.
        """
        spans = self.spans
        slots = 1 + max((span.slot for span in spans), default=0)
        lanes = 0.7 + (0.28 * slots if slots <= _MAX_NAMED_SLOTS else 8.0)

        def paint(figure: Any) -> None:
            figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
            upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(lanes, 1.3))
            self._paint_lanes(upper, spans, slots)
            self._paint_queue(lower, spans)

        plot = draw(0.5 + lanes + 1.3, paint)
        if path is not None:
            plot.save(expanded(path))
        return plot

    def _paint_lanes(self, axes: Any, spans: Sequence[SlotSpan], slots: int) -> None:
        is_named = slots <= _MAX_NAMED_SLOTS
        end = max((span.end for span in spans), default=1.0)
        height = 0.8 if is_named else 1.0
        admitted: set[int] = set()
        for span in spans:
            colour = _HUES[span.request % len(_HUES)][span.activity == "decode"]
            axes.barh(span.slot, span.end - span.begin, left=span.begin, height=height, color=colour, linewidth=0)
            if span.request not in admitted and is_named:
                axes.plot([span.begin], [span.slot - 0.4], marker="v", markersize=4, color=INK, clip_on=False)
            admitted.add(span.request)
            if span.activity == "decode" and span.end - span.begin > 0.02 * end and is_named:
                middle = (span.begin + span.end) / 2
                axes.annotate(f"{span.request}", (middle, span.slot), ha="center", va="center", fontsize=7, color=INK)
        for move in self._moves if is_named else ():
            arrow = {"arrowstyle": "-|>", "color": INK, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", (move.at, move.target), (move.at, move.source), arrowprops=arrow)
        axes.set_ylim(slots - 0.5, -0.5)
        axes.set_xlim(0, end)
        if is_named:
            axes.set_yticks(range(slots), [f"slot {slot}" for slot in range(slots)])
        else:
            axes.set_ylabel("slot")
        axes.tick_params(left=not is_named)
        text = f"{len(admitted)} requests in {slots} slots; dark: prefill, light: decode steps"
        axes.set_title(
            f"{text}; number: request, triangle: admitted, arrow: moved by compaction" if is_named else text, fontsize=9, color=INK
        )

    def _paint_queue(self, axes: Any, spans: Sequence[SlotSpan]) -> None:
        ends = sorted([(span.begin, 1) for span in spans] + [(span.end, -1) for span in spans], key=lambda item: (item[0], item[1]))
        times, busy = [0.0], [0]
        for at, change in ends:
            times.append(at)
            busy.append(busy[-1] + change)
        axes.fill_between(times, busy, step="post", color="#aab7c4", linewidth=0, label="slots in use")
        if self._waiting:
            waiting = [(0.0, self._waiting[0][1]), *self._waiting]
            waiting.append((max(times), waiting[-1][1]))
            axes.step(*zip(*waiting, strict=True), where="post", color="#c0392b", linewidth=1.2, label="waiting")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("seconds")
        axes.legend(loc="upper right", ncols=2, **LEGEND)
