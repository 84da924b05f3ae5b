"""``RequestQueue``: submitted prompts that share the slots of a session, one coming as another goes."""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from trt_kvcache.generation.request import Request
from trt_kvcache.generation.sampling import SamplingParams
from trt_kvcache.session.batch import ActiveSequences
from trt_kvcache.session.chunks import Chunk
from trt_kvcache.session.request_handle import RequestHandle
from trt_kvcache.session.step_executor import StepExecutor


class RequestQueue:
    """Prompts that wait for a slot, first in first out, and those that have one.

    If anything else has changed the sequences since the last step, requests that had a slot go back to the front of the
    queue, and what they had is run again.

    ``sequences``: Of the same cache. While requests run, its slots are theirs, in the order of ``_running``.
    """

    def __init__(self, steps: StepExecutor, sequences: ActiveSequences) -> None:
        self._steps = steps
        self._sequences = sequences
        self._submitted = 0
        self._waiting: deque[RequestHandle] = deque()
        self._running: list[RequestHandle] = []
        #: Of the sequences, after the last step; None if what the slots hold is not known.
        self._changes: int | None = None

    def submit(self, prompt: Sequence[int], params: SamplingParams, make_request: Callable[[SamplingParams], Request]) -> RequestHandle:
        """Put a prompt at the end of the queue: see ``InferenceSession.submit``. The prompt fits into a slot.

        Raises BindingError: the engine does not take every number of slots. Nothing was changed.
        """
        plan = self._steps.plan
        for count in range(1, self._steps.cache.max_batch_size + 1):
            for width in (1, plan.max_width):
                plan.profile_for(count, width)
        handle = RequestHandle(self._submitted, prompt, params, make_request)
        self._submitted += 1
        self._waiting.append(handle)
        return handle

    def step(self) -> list[RequestHandle]:
        """Move on by one token, or one chunk of a prompt: see ``InferenceSession.step``."""
        self._make_ready()
        running, admitted = self._running, self._next_in_line()
        if not running and not admitted:
            return []
        marks = [(handle, handle.mark) for handle in (*running, *admitted)]
        going = [handle.state == "decoding" for handle in running] + [False] * len(admitted)
        with self._knowing():
            try:
                with self._sequences.all_or_nothing():
                    self._admit(admitted)
                    moved = self._prefill()
                    if any(going):
                        moved += self._decode(going)
            except BaseException:
                self._running = running
                for handle, mark in marks:
                    handle.go_back(mark)
                raise
        return sorted(moved, key=lambda handle: handle.index)

    def _make_ready(self) -> None:
        """Take the slots of requests that have ended, or all slots if somebody else has used them."""
        if self._changes == self._sequences.changes:
            self._sequences.check_lengths()
            if any(handle.finished for handle in self._running):
                self._drop_ended()
            return
        self._forget_who_is_out()
        again = sorted((handle for handle in self._running if not handle.finished), key=lambda handle: handle.index)
        for handle in again:
            handle.move_to("queued")
        self._waiting.extendleft(reversed(again))
        self._running = []
        if self._next_in_line():
            with self._knowing():
                self._sequences.start([])

    def _drop_ended(self) -> None:
        """Let the last slots fill the places of those that have ended: nothing that is still needed is overwritten."""
        keep = [not handle.finished for handle in self._running]
        count = sum(keep)
        holes = (slot for slot in range(count) if not keep[slot])
        mapping = [-1 if not kept else slot if slot < count else next(holes) for slot, kept in enumerate(keep)]
        with self._knowing():
            self._sequences.compact(mapping)
            self._running = [self._running[slot] for _, slot in sorted((new, slot) for slot, new in enumerate(mapping) if new >= 0)]

    def _next_in_line(self) -> list[RequestHandle]:
        """Return those who get a slot now. They stay in line until the step is done."""
        self._forget_who_is_out()
        first, limit = len(self._running), self._sequences.max_sequence_length
        filling = any(handle.state == "prefilling" and len(handle.row) == limit for handle in self._running)
        if filling and not self._steps.plan.can_start_at(first):
            return []  # a slot that is full stands in the way of one behind it that no view starts at
        free = self._steps.cache.max_batch_size - first
        return list(itertools.islice((handle for handle in self._waiting if handle.state == "queued"), free))

    def _forget_who_is_out(self) -> None:
        while self._waiting and self._waiting[0].state != "queued":
            self._waiting.popleft()

    def _admit(self, admitted: Sequence[RequestHandle]) -> None:
        if not admitted:
            return
        first = len(self._running)
        self._sequences.add(len(admitted))
        self._running = [*self._running, *admitted]
        found = {slot: self._sequences.find(handle.row) for slot, handle in enumerate(admitted, start=first)}
        self._sequences.restore({slot: match for slot, match in found.items() if match is not None})
        for slot, handle in enumerate(admitted, start=first):
            handle.move_to("prefilling")
            self._sequences.samplers[slot] = handle.sampler

    def _prefill(self) -> list[RequestHandle]:
        """Run one chunk of every prompt that is not in its slot yet."""
        held = list(map(len, self._sequences.cached))
        rows = [handle.row[count:] if handle.state == "prefilling" else [] for handle, count in zip(self._running, held, strict=True)]
        if not any(rows):
            return []
        chunks = _first_round(self._steps.plan_prefill(held, list(map(len, rows))))
        logits = self._sequences.prefill(rows, chunks)
        for slot, row in enumerate(rows):
            if row and len(self._sequences.cached[slot]) == held[slot] + len(row):
                self._running[slot].move_to("decoding")
                self._sequences.remember([slot])
                self._choose(slot, logits[slot])
        return [handle for handle, count, tokens in zip(self._running, held, self._sequences.cached, strict=True) if len(tokens) > count]

    def _decode(self, going: Sequence[bool]) -> list[RequestHandle]:
        """Run the last token of those that are going; the others ride along."""
        tokens = [handle.last_token if goes else 0 for handle, goes in zip(self._running, going, strict=True)]
        logits = self._sequences.decode(tokens, None if all(going) else going)
        slots = list(itertools.compress(range(len(going)), going))
        for slot in slots:
            self._choose(slot, logits[slot])
        return [self._running[slot] for slot in slots]

    def _choose(self, slot: int, logits: np.ndarray[Any, Any]) -> None:
        handle = self._running[slot]
        handle.choose(logits, full=self._sequences.is_full(slot))
        self._sequences.pending[slot] = [handle.last_token]
        self._sequences.samplers[slot] = handle.sampler
        if handle.finished:
            self._sequences.remember([slot])

    @contextmanager
    def _knowing(self) -> Iterator[None]:
        """Know what the slots hold if the block ends, or if everything that it did was undone."""
        held = list(map(len, self._sequences.cached))
        self._changes = None
        try:
            yield
        except BaseException:
            if list(map(len, self._sequences.cached)) == held:
                self._changes = self._sequences.changes
            raise
        self._changes = self._sequences.changes


def _first_round(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return the first chunks, up to one that has a slot of those before it."""
    found: list[Chunk] = []
    for chunk in chunks:
        if found and chunk.first < found[-1].end:
            break
        found.append(chunk)
    return found
