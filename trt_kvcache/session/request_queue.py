"""``RequestQueue``: submitted prompts share the slots of a session; as one ends, the next takes its slot."""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from trt_kvcache.generation.request import Request
from trt_kvcache.session.batch import Batch
from trt_kvcache.session.chunks import Chunk
from trt_kvcache.session.request_handle import RequestHandle
from trt_kvcache.session.step_executor import StepExecutor
from trt_kvcache.session.timeline import Activity, Timeline


class RequestQueue:
    """Prompts that wait for a slot, first in first out, and those that have one.

    Parameters
    ----------
    steps : StepExecutor
        Of the session.
    batch : Batch
        Of the session. While requests run, its slots are theirs, in the same order.

    Notes
    -----
    If anything else has changed the batch since the last step, requests that had a slot return to the front of the queue, and their
    prompt and tokens are run again.
    """

    def __init__(self, steps: StepExecutor, batch: Batch) -> None:
        self._steps = steps
        self._batch = batch
        self._num_submitted = 0
        self._waiting: deque[RequestHandle] = deque()
        #: Requests that have a slot, by slot.
        self._running: list[RequestHandle] = []
        #: ``batch.changes`` after the last step; None if the slots may hold something else than the running requests.
        self._own_changes: int | None = None
        #: Records what the slots do, if it is there.
        self.timeline: Timeline | None = None

    def submit(self, request: Request) -> RequestHandle:
        """Put a request at the end of the queue.

        Parameters
        ----------
        request : Request
            Without tokens so far; its prompt fits into a slot.

        Returns
        -------
        RequestHandle
            In the state ``"queued"``. Its index is the number of requests that were submitted to this queue before.

        Raises
        ------
        BindingError
            The engine does not accept every number of slots. Nothing was changed.
        """
        self._steps.check_all_batch_sizes()
        request.index = self._num_submitted
        handle = RequestHandle(request)
        self._num_submitted += 1
        self._waiting.append(handle)
        return handle

    def step(self) -> list[RequestHandle]:
        """Advance each request by one token, or by one chunk of its prompt.

        Returns
        -------
        list of RequestHandle
            Those that have advanced, in the order in which they were submitted; empty if all have ended.

        Raises
        ------
        EngineError, CudaError, RangeError
            Requests and queue are as before the step, which can be repeated. Slots of ended requests may have been freed.
        """
        self._free_slots()
        running, admitted = self._running, self._next_waiting()
        if not running and not admitted:
            return []
        begin = self.timeline.now() if self.timeline else 0.0
        savepoints = [(handle, handle.savepoint()) for handle in (*running, *admitted)]
        decoding = [handle.state == "decoding" for handle in running] + [False] * len(admitted)
        with self._track_slot_owner():
            try:
                with self._batch.transaction():
                    self._admit(admitted)
                    advanced = self._prefill()
                    if any(decoding):
                        advanced += self._decode(decoding)
            except BaseException:
                self._running = running
                for handle, savepoint in savepoints:
                    handle.rollback(savepoint)
                raise
        if self.timeline:
            self._record_step(self.timeline, begin, decoding, advanced)
        return sorted(advanced, key=lambda handle: handle.index)

    def _record_step(self, timeline: Timeline, begin: float, decoding: Sequence[bool], advanced: Sequence[RequestHandle]) -> None:
        """Record what each slot did in the step that has just ended."""
        moved = set(map(id, advanced))
        did: list[tuple[int, Activity] | None] = [
            (handle.index, "decode" if goes else "prefill") if id(handle) in moved else None
            for handle, goes in zip(self._running, decoding, strict=True)
        ]
        timeline.record_step(begin, did, sum(handle.state == "queued" for handle in self._waiting))

    def _free_slots(self) -> None:
        """Free the slots of requests that have ended; all slots if another call has used the batch."""
        if self._own_changes == self._batch.changes:
            if any(handle.finished for handle in self._running):
                self._drop_ended()
            return
        self._drop_cancelled()
        again = sorted((handle for handle in self._running if not handle.finished), key=lambda handle: handle.index)
        for handle in again:
            handle.move_to("queued")
        self._waiting.extendleft(reversed(again))
        self._running = []
        if self._next_waiting():
            with self._track_slot_owner():
                self._batch.clear()

    def _drop_ended(self) -> None:
        """Move the last slots to the places of requests that have ended. Nothing that is still needed is overwritten."""
        keep = [not handle.finished for handle in self._running]
        count = sum(keep)
        holes = (slot for slot in range(count) if not keep[slot])
        mapping = [-1 if not kept else slot if slot < count else next(holes) for slot, kept in enumerate(keep)]
        with self._track_slot_owner():
            self._batch.compact(mapping)
            if self.timeline:
                self.timeline.record_moves([handle.index for handle in self._running], mapping)
            self._running = [self._running[slot] for _, slot in sorted((new, slot) for slot, new in enumerate(mapping) if new >= 0)]

    def _next_waiting(self) -> list[RequestHandle]:
        """Return the requests that get a slot now. They stay in the queue until the step is done."""
        self._drop_cancelled()
        first, limit = len(self._running), self._batch.max_sequence_length
        filling = any(handle.state == "prefilling" and len(handle.row) == limit for handle in self._running)
        if filling and not self._steps.plan.can_start_at(first):
            return []  # its slot will be full, and then the slot behind it could not be reached by an aligned view
        free = self._steps.cache.max_batch_size - first
        return list(itertools.islice((handle for handle in self._waiting if handle.state == "queued"), free))

    def _drop_cancelled(self) -> None:
        """Remove requests from the front of the queue that do not wait any more: they have a slot, or were cancelled."""
        while self._waiting and self._waiting[0].state != "queued":
            self._waiting.popleft()

    def _admit(self, admitted: Sequence[RequestHandle]) -> None:
        """Give each a slot behind the others, and what the prompt cache has of its prompt."""
        if not admitted:
            return
        self._batch.add([handle.row for handle in admitted], [handle.sampler for handle in admitted])
        self._running = [*self._running, *admitted]
        for handle in admitted:
            handle.move_to("prefilling")

    def _prefill(self) -> list[RequestHandle]:
        """Run one chunk of every prompt that is not in its slot yet, and return the requests that have advanced."""
        held = self._batch.held
        rows = [handle.row[count:] if handle.state == "prefilling" else [] for handle, count in zip(self._running, held, strict=True)]
        if not any(rows):
            return []
        logits = self._batch.prefill(rows, _first_round(self._batch.plan_prefill(held, rows)))
        advanced = []
        for slot, (handle, row, before, after) in enumerate(zip(self._running, rows, held, self._batch.held, strict=True)):
            if after > before:
                advanced.append(handle)
            if row and after == before + len(row):
                handle.move_to("decoding")
                self._batch.remember([slot])
                self._choose(slot, logits[slot])
        return advanced

    def _decode(self, decoding: Sequence[bool]) -> list[RequestHandle]:
        """Run the last token of the requests that are decoding; the other slots are idle in this step."""
        tokens = [handle.last_token if goes else 0 for handle, goes in zip(self._running, decoding, strict=True)]
        logits = self._batch.decode(tokens, None if all(decoding) else decoding)
        slots = list(itertools.compress(range(len(decoding)), decoding))
        for slot in slots:
            self._choose(slot, logits[slot])
        return [self._running[slot] for slot in slots]

    def _choose(self, slot: int, logits: np.ndarray[Any, Any]) -> None:
        """Choose the next token of a slot's request."""
        handle = self._running[slot]
        handle.choose(logits, full=self._batch.is_full(slot))
        self._batch.record_token(slot, handle.last_token, handle.sampler, generated=handle.generated)
        if handle.finished:
            self._batch.remember([slot])

    @contextmanager
    def _track_slot_owner(self) -> Iterator[None]:
        """Record that the slots are those of the running requests: after the block, or if it failed and all it did was undone."""
        held = self._batch.held
        self._own_changes = None
        try:
            yield
        except BaseException:
            if self._batch.held == held:
                self._own_changes = self._batch.changes
            raise
        self._own_changes = self._batch.changes


def _first_round(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return the first chunks, up to one that has a slot of those before it."""
    found: list[Chunk] = []
    for chunk in chunks:
        if found and chunk.first < found[-1].end:
            break
        found.append(chunk)
    return found
