"""``WorkerPool``: mask jobs of guided requests, and the worker processes that run them.

Short jobs share a worker. If one turns out to be long, the others move to another worker, which compiles their grammars again and consumes
their tokens: masks do not depend on the worker. So when a worker ends, only the request whose job it ran fails, and only if that job was
the cause; otherwise, for example because another program killed the worker, the job is tried again. The first worker starts with the first
job; one is kept, the others end when they have no work.
"""

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
from trt_kvcache.server.guidance.guidance_options import GuidanceOptions
from trt_kvcache.server.guidance.process import Opening, Usage, WorkerEndedError, WorkerProcess

#: Seconds of CPU time, and of wall-clock time, after which a job is long: its worker serves only its text, and others move away.
_LONG, _LONG_BY_CLOCK = 0.1, 2.0

#: Seconds of CPU time after which even compiling a grammar, which happens once, gets the lowest priority.
_VERY_LONG = 0.5

#: Seconds between two checks of the usage of jobs.
_TICK = 0.02

#: Most seconds of wall-clock time for a second of CPU time.
_STRETCH = 10.0

#: Most seconds for the start of a worker, and seconds that an idle one is kept.
_START, _IDLE = 60.0, 30.0

#: Seconds after which an idle worker checks whether it is still needed.
_PAUSE = 1.0

#: Seconds for which a grammar above a limit is refused immediately, and most such grammars.
_REMEMBERED, _MOST_REMEMBERED = 60.0, 1024

#: Attempts at a job whose worker was ended from outside.
_ATTEMPTS = 3

#: Bytes that a worker may use apart from its grammars.
_BASE = 4 << 30


class GuidedText:
    """A grammar and the text of one request. Its matcher is in the worker that ran its last job; any worker can rebuild it."""

    _names = itertools.count()

    def __init__(self, grammar: Grammar, client: str = "") -> None:
        self.grammar = grammar
        self.client = client
        self.name = next(self._names)


@dataclass(eq=False)
class Job:
    """Computation of the mask after some tokens of a text."""

    text: GuidedText
    tokens: tuple[int, ...]
    result: Future[bytes] = field(default_factory=Future)  # one bit for each token
    attempts: int = 0  # workers that have ended during the job

    @cached_property
    def is_first(self) -> bool:
        """True for the first mask of a text: its grammar may not be compiled yet."""
        return not self.tokens

    def finish(self, mask: bytes) -> None:
        """Set its mask, unless it was cancelled."""
        with suppress(InvalidStateError):
            self.result.set_result(mask)

    def fail(self, error: Exception) -> None:
        """Set its error, unless it was cancelled."""
        with suppress(InvalidStateError):
            self.result.set_exception(error)


class _Lane:
    """A worker process and its current job."""

    def __init__(self, process: WorkerProcess) -> None:
        self.process = process
        self.opened = False
        self.job: Job | None = None
        self.began = time.monotonic()
        #: Usage before its first job, and seconds of CPU time before the current one.
        self.base = Usage(0.0, 0)
        self.before = 0.0
        #: Tokens that its matchers have consumed, by text.
        self.held: dict[int, tuple[int, ...]] = {}
        self.dropped: list[int] = []
        #: True if it has a long job, or had one that computed a mask: it serves one text only.
        self.is_slow = False
        #: True if it has the lowest priority, which cannot be raised again.
        self.is_lowest = False
        #: Reason why it was killed, for the error of its job; empty if the job was not the cause.
        self.reason: str | None = None

    @property
    def is_idle(self) -> bool:
        """True if it can take a job."""
        return self.opened and self.job is None

    @property
    def is_long(self) -> bool:
        """True if other jobs should not wait for its current one."""
        return self.job is not None and self.is_slow

    def set_slow(self, job: Job) -> None:
        """Reserve it for the text of a job; other texts move away."""
        self.is_slow = True
        for name in [name for name in self.held if name != job.text.name]:
            del self.held[name]
            self.dropped.append(name)

    def take(self, job: Job) -> None:
        """Begin a job."""
        self.job, self.began, self.before = job, time.monotonic(), self.process.usage().seconds


class WorkerPool:
    """Runs jobs in worker processes. A job above a limit ends its worker."""

    def __init__(self, opening: Opening, options: GuidanceOptions, *, max_texts: int) -> None:
        self._opening = opening._replace(memory=_BASE + 2 * (options.memory_mib << 20))
        self._options = options
        self._max_lanes = max_texts + options.max_compiles
        self._change = threading.Condition()
        self._waiting: Turns[Job] = Turns()
        self._lanes: list[_Lane] = []
        self._ended: deque[int] = deque()
        #: Grammars above a limit, by key: the time until which they are refused, and the reason.
        self._expensive: dict[bytes, tuple[float, str]] = {}
        self._watcher: threading.Thread | None = None
        self._failed_starts = 0
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the running workers."""
        with self._change:
            return [lane.process.pid for lane in self._lanes if lane.process.pid is not None]

    def submit(self, job: Job) -> None:
        """Queue a job. Does not wait."""
        with self._change:
            if self._closed:
                job.fail(ClosedError("guided decoding: the workers have ended."))
                return
            self._waiting.add(job.text.client, job)
            self._refuse_expensive()
            self._start_a_lane_if_needed()
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="trt_kvcache guidance", daemon=True)
                self._watcher.start()
            self._change.notify_all()

    def cancel(self, job: Job) -> None:
        """Cancel a job: it leaves the queue, or its worker is killed if the job turns out to be long."""
        job.result.cancel()
        with self._change:
            self._waiting.discard(job.text.client, job)

    def forget(self, text: GuidedText) -> None:
        """Drop a text that has ended. Takes no lock, as a finalizer calls it in any thread."""
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
        """Return the queued jobs in the order in which clients take turns."""
        return self._waiting.first(len(self._waiting), Counter(lane.job.text.client for lane in self._lanes if lane.job is not None))

    def _take_all(self) -> list[Job]:
        """Empty the queue, and return its jobs."""
        jobs = self._in_turn()
        for job in jobs:
            self._waiting.discard(job.text.client, job)
        return jobs

    def _start_a_lane_if_needed(self) -> None:
        """Start a worker if a job can begin and all workers are busy with long jobs."""
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
        """Tell whether there is another shared worker."""
        return any(other is not lane and not other.is_slow for other in self._lanes)

    def _may_begin(self, job: Job) -> bool:
        """Tell whether a job may begin: the number of first jobs at a time is limited."""
        firsts = sum(lane.job is not None and lane.job.is_first for lane in self._lanes)
        return not job.is_first or firsts < self._options.max_compiles

    def _drop(self, name: int) -> None:
        """Drop a text in all workers."""
        for lane in self._lanes:
            if lane.held.pop(name, None) is not None:
                lane.dropped.append(name)

    def _refuse_expensive(self) -> None:
        """Fail jobs of grammars that were recently above a limit: repeating one costs nothing more."""
        if not self._expensive:
            return
        now = time.monotonic()
        for job in filter(lambda one: one.is_first, self._in_turn()):
            until, reason = self._expensive.get(job.text.grammar.key, (0.0, ""))
            if until > now:
                self._waiting.discard(job.text.client, job)
                job.fail(job.text.grammar.refused(reason, first=True))

    def _next_job(self, lane: _Lane) -> Job | None:
        """Return the first job in the queue for this lane, and take it out."""
        while self._ended:
            self._drop(self._ended.popleft())
        self._refuse_expensive()
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
        """Run jobs in a worker until it ends."""
        try:
            if self._open(lane):
                while (job := self._await_job(lane)) is not None:
                    self._run_job(lane, job)
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
        """Wait for a worker to start. If it cannot, fail all jobs."""
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

    def _run_job(self, lane: _Lane, job: Job) -> None:
        name = job.text.name
        with self._change:
            held = lane.held.get(name)
            dropped, lane.dropped = lane.dropped, []
        kept = 0 if held is None else _common_prefix(held, job.tokens)
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
                if name not in lane.dropped:  # unless another worker has continued the text
                    lane.held[name] = job.tokens
                job.finish(mask)
            else:
                lane.held.pop(name, None)
                job.fail(job.text.grammar.refused(f"expected {refused}", first=job.is_first))
            self._change.notify_all()

    def _after_end(self, lane: _Lane, job: Job, code: int) -> None:
        """Fail the job of a worker that has ended, or queue it again if the cause was outside."""
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
            self._expensive[job.text.grammar.key] = time.monotonic() + _REMEMBERED, reason
            while len(self._expensive) > _MOST_REMEMBERED:
                del self._expensive[next(iter(self._expensive))]
        job.fail(job.text.grammar.refused(reason, first=job.is_first))

    # --- in the thread that watches ---

    def _watch(self) -> None:
        """Kill workers whose jobs exceed a limit, and start others if all have long ones."""
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
        """Return the limit that a job exceeds, as a reason; empty if other texts in its worker caused it; None if there is none."""
        options = self._options
        what, limit = ("compiles", options.compile_seconds) if job.is_first else ("has its next mask", options.mask_seconds)
        # In a new worker, the grammar is compiled and the tokens are consumed again first.
        seconds = limit if job.is_first or job.text.name in lane.held else limit + 2 * options.compile_seconds
        if usage.seconds - lane.before > seconds or lasted > _STRETCH * seconds:
            return f"expected a grammar that {what} within {limit:g} seconds, got one that takes longer"
        if usage.nbytes - lane.base.nbytes > options.memory_mib << 20:
            alone = not set(lane.held) - {job.text.name}
            return f"expected a grammar that takes at most {options.memory_mib} MiB of memory, got one that takes more" if alone else ""
        return None


def _common_prefix(held: Sequence[int], tokens: Sequence[int]) -> int:
    """Return the length of the common prefix."""
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
