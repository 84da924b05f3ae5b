"""``WorkerPool``: jobs of guided requests, and the worker processes that do them."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from trt_kvcache._util.extras import naming_the_extra
from trt_kvcache._util.turns import Turns
from trt_kvcache.errors import ClosedError, ConfigError, ProcessorError
from trt_kvcache.server.guidance.grammar import Grammar
from trt_kvcache.server.guidance.options import GuidanceOptions
from trt_kvcache.server.guidance.process import Opening, Usage, WorkerEndedError, WorkerProcess

#: Seconds of a processor, and by the clock, after which a job is long: then its worker is for its text alone, and others move to another.
_LONG, _LONG_BY_CLOCK = 0.1, 2.0

#: Seconds of a processor after which even a grammar that is compiled, which happens once, gets the lowest priority.
_VERY_LONG = 0.5

#: Seconds between two looks at what the jobs use.
_TICK = 0.02

#: Seconds by the clock that a second of a processor may last.
_STRETCH = 10.0

#: Seconds that a worker may take to start, and that one without work is kept.
_START, _IDLE = 60.0, 30.0

#: Seconds after which a worker without work looks whether it is still needed.
_PAUSE = 1.0

#: Seconds for which a grammar that took too much is refused at once, and how many of them.
_REMEMBERED, _MOST_REMEMBERED = 60.0, 1024

#: How often a job is tried whose worker something else has ended.
_ATTEMPTS = 3

#: Bytes that every worker may have, whatever its grammars may.
_BASE = 4 << 30


class GuidedText:
    """A grammar, and the text that one request writes by it. Its state is where it is used last, and can be made again anywhere."""

    _names = itertools.count()

    def __init__(self, grammar: Grammar, client: str = "") -> None:
        self.grammar = grammar
        self.client = client
        self.name = next(self._names)


@dataclass(eq=False)
class Job:
    """The mask behind some tokens of a text."""

    text: GuidedText
    tokens: tuple[int, ...]
    result: Future[bytes] = field(default_factory=Future)
    attempts: int = 0

    @cached_property
    def is_first(self) -> bool:
        """Whether nothing is known of its grammar."""
        return not self.tokens

    def finish(self, mask: bytes) -> None:
        """End it with its mask, unless nobody waits for it any more."""
        with suppress(InvalidStateError):
            self.result.set_result(mask)

    def fail(self, error: Exception) -> None:
        """End it with an error, unless nobody waits for it any more."""
        with suppress(InvalidStateError):
            self.result.set_exception(error)


class _Lane:
    """A worker process, and the job that it does."""

    def __init__(self, process: WorkerProcess) -> None:
        self.process = process
        self.opened = False
        self.job: Job | None = None
        self.began = time.monotonic()
        #: What it used before its first job, and the seconds before this one.
        self.base = Usage(0.0, 0)
        self.before = 0.0
        #: The texts that it knows, with the tokens that they have there.
        self.held: dict[int, tuple[int, ...]] = {}
        self.dropped: list[int] = []
        #: Whether it has a long job, or had one that computed a mask: then it is for one text alone.
        self.is_slow = False
        #: Whether it has the lowest priority, which cannot be raised again.
        self.is_lowest = False
        #: Why it was ended, for its job; empty if that is not to blame.
        self.reason: str | None = None

    @property
    def is_idle(self) -> bool:
        """Whether it can take a job."""
        return self.opened and self.job is None

    @property
    def is_long(self) -> bool:
        """Whether it does a job that others should not wait for."""
        return self.job is not None and self.is_slow

    def set_slow(self, job: Job) -> None:
        """Keep it for the text of a job; the others go elsewhere."""
        self.is_slow = True
        for name in [name for name in self.held if name != job.text.name]:
            del self.held[name]
            self.dropped.append(name)

    def take(self, job: Job) -> None:
        """Begin a job."""
        self.job, self.began, self.before = job, time.monotonic(), self.process.usage().seconds


class WorkerPool:
    """Does jobs in worker processes, each of which ends with the job that takes too much."""

    def __init__(self, opening: Opening, options: GuidanceOptions, *, max_texts: int) -> None:
        self._opening = opening._replace(memory=_BASE + 2 * (options.memory_mib << 20))
        self._options = options
        self._max_lanes = max_texts + options.max_compiles
        self._change = threading.Condition()
        self._waiting: Turns[Job] = Turns()
        self._lanes: list[_Lane] = []
        self._ended: deque[int] = deque()
        #: Grammars that took too much: until when they are refused, and why.
        self._hurtful: dict[bytes, tuple[float, str]] = {}
        self._watcher: threading.Thread | None = None
        self._failed_starts = 0
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """The processes that run."""
        with self._change:
            return [lane.process.pid for lane in self._lanes if lane.process.pid is not None]

    def submit(self, job: Job) -> None:
        """Put a job at the end of the queue. Does not wait."""
        with self._change:
            if self._closed:
                job.fail(ClosedError("guided decoding: the workers have ended."))
                return
            self._waiting.add(job.text.client, job)
            self._refuse_what_has_hurt()
            self._start_a_lane_if_needed()
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="trt_kvcache guidance", daemon=True)
                self._watcher.start()
            self._change.notify_all()

    def cancel(self, job: Job) -> None:
        """Say that nobody waits for a job: it leaves the queue, or its worker is ended once it turns out to be long."""
        job.result.cancel()
        with self._change:
            self._waiting.discard(job.text.client, job)

    def forget(self, text: GuidedText) -> None:
        """Say that a text has ended. Takes no lock: a text that nobody uses any more may end anywhere."""
        self._ended.append(text.name)

    def close(self) -> None:
        """End all workers and jobs. Idempotent."""
        with self._change:
            self._closed = True
            lanes = list(self._lanes)
            for job in (*self._take_all(), *(lane.job for lane in lanes if lane.job is not None)):
                job.fail(ClosedError("guided decoding: the workers have ended."))
            for lane in lanes:
                lane.process.kill()
            self._change.notify_all()
            self._change.wait_for(lambda: not self._lanes, timeout=5)

    # --- with the lock held ---

    def _in_turn(self) -> list[Job]:
        """Return the jobs that wait, in the order of their turns."""
        return self._waiting.first(len(self._waiting), Counter(lane.job.text.client for lane in self._lanes if lane.job is not None))

    def _take_all(self) -> list[Job]:
        """Take all jobs out of the queue."""
        jobs = self._in_turn()
        for job in jobs:
            self._waiting.discard(job.text.client, job)
        return jobs

    def _start_a_lane_if_needed(self) -> None:
        """Start a worker if a job can be begun, and no worker is about to have time for it."""
        if not any(map(self._may_begin, self._in_turn())) or not all(lane.is_long or lane.is_slow for lane in self._lanes):
            return
        if len(self._lanes) < self._max_lanes:
            self._start_a_lane()

    def _start_a_lane(self) -> None:
        if not self._closed:
            lane = _Lane(WorkerProcess(self._opening))
            self._lanes.append(lane)
            threading.Thread(target=self._run, args=(lane,), name="trt_kvcache guidance worker", daemon=True).start()

    def _has_another(self, lane: _Lane) -> bool:
        """Tell whether there is another worker for all."""
        return any(other is not lane and not other.is_slow for other in self._lanes)

    def _may_begin(self, job: Job) -> bool:
        """Tell whether a job is not one of too many first ones."""
        firsts = sum(lane.job is not None and lane.job.is_first for lane in self._lanes)
        return not job.is_first or firsts < self._options.max_compiles

    def _drop(self, name: int) -> None:
        """Have all workers forget a text."""
        for lane in self._lanes:
            if lane.held.pop(name, None) is not None:
                lane.dropped.append(name)

    def _refuse_what_has_hurt(self) -> None:
        """Fail jobs of grammars that took too much a moment ago: a client that sends one again and again costs no more than once."""
        if not self._hurtful:
            return
        now = time.monotonic()
        for job in filter(lambda one: one.is_first, self._in_turn()):
            until, reason = self._hurtful.get(job.text.grammar.key, (0.0, ""))
            if until > now:
                self._waiting.discard(job.text.client, job)
                job.fail(job.text.grammar.refused(reason, first=True))

    def _next_job(self, lane: _Lane) -> Job | None:
        """Return the first job in the queue that is for this lane."""
        while self._ended:
            self._drop(self._ended.popleft())
        self._refuse_what_has_hurt()
        homes = {name: other for other in self._lanes for name in other.held}
        is_first_idle = lane is next((other for other in self._lanes if other.is_idle and not other.is_slow), None)
        for job in self._in_turn():
            home = homes.get(job.text.name)
            if home is lane or (self._may_begin(job) and not lane.is_slow and is_first_idle and (home is None or home.is_long)):
                self._waiting.discard(job.text.client, job)
                self._waiting.end_turn(job.text.client)
                if home is not lane:
                    self._drop(job.text.name)
                return job
        return None

    # --- in the thread of a lane ---

    def _run(self, lane: _Lane) -> None:
        """Do jobs in a worker until it ends."""
        try:
            if self._open(lane):
                while (job := self._await_job(lane)) is not None:
                    self._do(lane, job)
        except WorkerEndedError:
            pass
        code = lane.process.close()
        with self._change:
            self._lanes.remove(lane)
            if not lane.opened:
                self._count_failed_start()
            if lane.job is not None:
                self._after_end(lane, lane.job, code)
            if lane.opened and not self._has_another(lane):
                self._start_a_lane()  # large vocabularies take seconds to open
            self._start_a_lane_if_needed()
            self._change.notify_all()

    def _open(self, lane: _Lane) -> bool:
        """Wait for a worker to start; if it cannot, nobody's job can be done."""
        said = lane.process.open()
        with self._change:
            if not said:
                lane.opened, lane.base, self._failed_starts = True, lane.process.usage(), 0
                self._change.notify_all()
                return True
            for job in self._take_all():
                job.fail(_cannot_start(said))
        return False

    def _count_failed_start(self) -> None:
        self._failed_starts += 1
        if self._failed_starts >= _ATTEMPTS:
            self._failed_starts = 0
            for job in self._take_all():
                job.fail(ProcessorError("guided decoding: no worker process can be started."))

    def _await_job(self, lane: _Lane) -> Job | None:
        """Wait for a job; return None if the worker is not needed any more."""
        idle_since = time.monotonic()
        with self._change:
            while not self._closed:
                job = self._next_job(lane)
                if job is not None:
                    lane.take(job)
                    return job
                is_needed = lane.held if lane.is_slow else time.monotonic() - idle_since < _IDLE or not self._has_another(lane)
                if not is_needed:
                    return None
                self._change.wait(_TICK if self._waiting else _PAUSE)
        return None

    def _do(self, lane: _Lane, job: Job) -> None:
        name = job.text.name
        with self._change:
            held = lane.held.get(name)
            dropped, lane.dropped = lane.dropped, []
        kept = 0 if held is None else _common(held, job.tokens)
        header: dict[str, Any] = {"name": name, "kept": kept, "tokens": job.tokens[kept:], "drop": dropped}
        payload = b""
        if held is None:
            header["kind"], payload = job.text.grammar.kind, job.text.grammar.text
        answer, mask = lane.process.exchange(header, payload)
        with self._change:
            if lane.reason is not None:  # too late
                raise WorkerEndedError
            lane.job = None
            refused = answer.get("refused")
            lane.is_slow = lane.is_slow and (lane.is_lowest or not job.is_first)
            if refused is None:
                if name not in lane.dropped:  # by a worker that went on with the text
                    lane.held[name] = job.tokens
                job.finish(mask)
            else:
                lane.held.pop(name, None)
                job.fail(job.text.grammar.refused(f"expected {refused}", first=job.is_first))
            self._change.notify_all()

    def _after_end(self, lane: _Lane, job: Job, code: int) -> None:
        """Say what became of the job of a worker that has ended: it failed, or it is done by another worker."""
        if job.result.done():
            return
        job.attempts += 1
        from_outside = lane.reason == "" or (
            lane.reason is None and code in (-getattr(signal, "SIGKILL", 9), -getattr(signal, "SIGTERM", 15))
        )
        if from_outside and job.attempts < _ATTEMPTS:
            self._waiting.add(job.text.client, job)
            return
        reason = lane.reason or f"expected a grammar that llguidance can take, but it has crashed ({_signal(code)})"
        if job.is_first:
            self._hurtful[job.text.grammar.key] = time.monotonic() + _REMEMBERED, reason
            while len(self._hurtful) > _MOST_REMEMBERED:
                del self._hurtful[next(iter(self._hurtful))]
        job.fail(job.text.grammar.refused(reason, first=job.is_first))

    # --- in the thread that watches ---

    def _watch(self) -> None:
        """End workers whose jobs take too much, and start others when all have long ones."""
        with self._change:
            while not self._closed:
                self._change.wait(_TICK if self._waiting or any(not lane.is_idle for lane in self._lanes) else None)
                for lane in self._lanes:
                    self._check(lane)
                if self._waiting:
                    self._start_a_lane_if_needed()
                    self._change.notify_all()

    def _check(self, lane: _Lane) -> None:
        now = time.monotonic()
        if not lane.opened:
            if now - lane.began > _START:
                lane.process.kill()
            return
        job, lasted = lane.job, now - lane.began
        if job is None or lasted < _TICK or lane.reason is not None:
            return
        usage = lane.process.usage()
        used = usage.seconds - lane.before
        if not lane.is_slow and (used > _LONG or lasted > _LONG_BY_CLOCK):
            lane.set_slow(job)
        if lane.is_slow and not lane.is_lowest and (used > _VERY_LONG or not job.is_first):
            lane.is_lowest = True
            lane.process.lower_priority()
        if job.result.cancelled() and lane.is_slow:
            lane.reason = ""
        else:
            lane.reason = self._excess(lane, job, usage, lasted)
        if lane.reason is not None:
            lane.process.kill()

    def _excess(self, lane: _Lane, job: Job, usage: Usage, lasted: float) -> str | None:
        """Return what a job takes too much of, empty if others are to blame for it."""
        options = self._options
        what, limit = ("compiles", options.compile_seconds) if job.is_first else ("has its next mask", options.mask_seconds)
        # In another worker, a text is compiled and read again first.
        seconds = limit if job.is_first or job.text.name in lane.held else limit + 2 * options.compile_seconds
        if usage.seconds - lane.before > seconds or lasted > _STRETCH * seconds:
            return f"expected a grammar that {what} within {limit:g} seconds, got one that takes longer"
        if usage.nbytes - lane.base.nbytes > options.memory_mib << 20:
            alone = not set(lane.held) - {job.text.name}
            return f"expected a grammar that takes at most {options.memory_mib} MiB of memory, got one that takes more" if alone else ""
        return None


def _common(held: Sequence[int], tokens: Sequence[int]) -> int:
    """Return how many tokens two texts have in common."""
    if tokens[: len(held)] == held:
        return len(held)
    return next((index for index, (one, other) in enumerate(zip(held, tokens, strict=False)) if one != other), min(len(held), len(tokens)))


def _signal(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"exit code {code}"


def _cannot_start(said: dict[str, str]) -> Exception:
    if "missing" in said:
        try:
            with naming_the_extra():
                raise ModuleNotFoundError(f"No module named {said['missing']!r}", name=said["missing"])
        except ModuleNotFoundError as error:
            return error
    return ConfigError(f"guided decoding: llguidance does not read the tokenizer of this model: {said['refused']}.")
