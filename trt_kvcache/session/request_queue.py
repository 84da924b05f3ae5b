"""``RequestQueue``: submitted prompts share the slots of a session; as one ends, the next takes its slot."""

import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from trt_kvcache._util.nvtx_ranges import nvtx_range
from trt_kvcache._util.turns import Turns
from trt_kvcache.generation.request import GeneratedToken, Request
from trt_kvcache.session.batch import Batch, Logits
from trt_kvcache.session.chunks import Chunk
from trt_kvcache.session.queued_request import QueuedRequest
from trt_kvcache.session.request_handle import RequestHandle
from trt_kvcache.session.shared_prompts import SharedPrompts
from trt_kvcache.session.step_executor import StepExecutor
from trt_kvcache.session.timeline import Activity, Timeline
from trt_kvcache.session.token_steps import TokenSteps

#: Seconds that a step without anything to run waits for logits processors: for those of the only request that waits, or of one of several.
_PAUSE, _SHORT_PAUSE = 0.005, 0.001

_LOGGER = logging.getLogger("trt_kvcache.session")


class RequestQueue:
    """Prompts that wait for a slot, and those that have one. Clients take turns; of one client, first in, first out."""

    def __init__(self, steps: StepExecutor, batch: Batch, token_steps: TokenSteps) -> None:
        self._steps = steps
        self._batch = batch
        self._token_steps = token_steps
        self._shared_prompts = SharedPrompts(steps, batch)
        self._num_submitted = 0
        #: Requests that have not had a slot. Those that have got one leave by the end of the step.
        self._waiting: Turns[QueuedRequest] = Turns()
        #: Requests that had a slot when something else used the batch: first of all.
        self._returning: list[QueuedRequest] = []
        #: Requests that have a slot, by slot.
        self._running: list[QueuedRequest] = []
        #: ``batch.changes`` after the last step; None if the slots may hold something else than the running requests.
        self._own_changes: int | None = None
        #: Records what the slots do, if it is there.
        self.timeline: Timeline | None = None

    @property
    def running(self) -> list[RequestHandle]:
        """The requests that have a slot, by slot. Those that ended in the last step are still among them."""
        return [queued.handle for queued in self._running]

    @property
    def num_waiting(self) -> int:
        """How many requests wait for a slot."""
        return len(self._waiting) + sum(queued.state == "queued" for queued in self._returning)

    @property
    def num_waiting_clients(self) -> int:
        """How many clients have requests that wait for their first slot."""
        return self._waiting.num_clients

    def submit(self, request: Request, *, prompt_logprobs: int | None = None, client: str = "") -> RequestHandle:
        """Put a request at the end of its client's line."""
        self._steps.check_all_batch_sizes()
        request.index = self._num_submitted
        queued = QueuedRequest(request, prompt_logprobs=prompt_logprobs, client=client, waiting=self._waiting)
        self._num_submitted += 1
        self._waiting.add(client, queued)
        seed = f", seed {request.sampler[0]}" if request.sampled else ""
        _LOGGER.info(
            "request %d: %d prompt tokens%s, is number %d in the queue", request.index, len(request.prompt), seed, len(self._waiting)
        )
        return queued.handle

    def step(self) -> list[RequestHandle]:
        """Advance each request by one token, or by one chunk of its prompt."""
        self._free_slots()
        running, admitted = self._running, self._next_waiting()
        if not running and not admitted:
            return []
        begin = self.timeline.now() if self.timeline else 0.0
        savepoints = [(queued, queued.savepoint()) for queued in (*running, *admitted)]
        with self._track_slot_owner():
            try:
                with self._batch.transaction():
                    # First of all, so that one that fails here costs the others nothing.
                    resumed = self._resume()
                    decoding = [queued.state == "decoding" and not queued.request.waits for queued in running] + [False] * len(admitted)
                    self._admit(admitted)
                    advanced = resumed + self._prefill()
                    if any(decoding):
                        advanced += self._decode(decoding)
            except BaseException:
                self._running = running
                for queued, savepoint in savepoints:
                    queued.rollback(savepoint)
                raise
        self._leave_queue(admitted)
        if self.timeline:
            self._record_step(self.timeline, begin, decoding, advanced)
        if _LOGGER.isEnabledFor(logging.INFO):
            self._log_step(admitted)
        waiting = [queued for queued in self._running if queued.request.waits and not queued.finished]
        if waiting and not advanced:
            # Of several, another one may be the first to be ready.
            waiting[0].request.ready(_PAUSE if len(waiting) == 1 else _SHORT_PAUSE)
        moved = {queued.index: queued.handle for queued in (*advanced, *waiting)}
        return [moved[index] for index in sorted(moved)]

    def _log_step(self, admitted: Sequence[QueuedRequest]) -> None:
        """Log which requests began and ended in the step that has just ended."""
        for slot, queued in enumerate(self._running):
            if queued in admitted:
                reused = self._batch.reused[slot]
                _LOGGER.info("request %d: begins in slot %d, %d of its tokens are copies", queued.index, slot, reused)
            if queued.finished:
                _LOGGER.info("request %d: ended after %d tokens, %s", queued.index, queued.request.num_tokens, queued.handle.finish_reason)

    def _record_step(self, timeline: Timeline, begin: float, decoding: Sequence[bool], advanced: Sequence[QueuedRequest]) -> None:
        """Record what each slot did in the step that has just ended."""
        moved = set(map(id, advanced))
        did: list[tuple[int, Activity] | None] = [
            (queued.index, "decode" if goes else "prefill") if id(queued) in moved else None
            for queued, goes in zip(self._running, decoding, strict=True)
        ]
        timeline.record_step(begin, did, self.num_waiting)

    def _free_slots(self) -> None:
        """Free the slots of requests that have ended; all slots if another call has used the batch."""
        if self._own_changes == self._batch.changes:
            if any(queued.finished for queued in self._running):
                self._drop_ended()
            return
        again = sorted((queued for queued in self._running if not queued.finished), key=lambda queued: queued.index)
        for queued in again:
            queued.stage = "queued"
        self._returning = [*again, *(queued for queued in self._returning if queued not in again)]
        self._running = []
        if self._next_waiting():
            with self._track_slot_owner():
                self._batch.clear()

    def _drop_ended(self) -> None:
        """Move the last slots to the places of requests that have ended. Nothing that is still needed is overwritten."""
        keep = [not queued.finished for queued in self._running]
        count = sum(keep)
        holes = (slot for slot in range(count) if not keep[slot])
        mapping = [-1 if not kept else slot if slot < count else next(holes) for slot, kept in enumerate(keep)]
        with self._track_slot_owner():
            self._batch.compact(mapping)
            if self.timeline:
                self.timeline.record_moves([queued.index for queued in self._running], mapping)
            before = self._running
            self._running = [before[slot] for _, slot in sorted((new, slot) for slot, new in enumerate(mapping) if new >= 0)]
        for queued, kept in zip(before, keep, strict=True):
            if not kept:
                self._waiting.end_turn(queued.client)

    def _next_waiting(self) -> list[QueuedRequest]:
        """Return the requests that get a slot now. They stay in the queue until the step is done."""
        first, limit = len(self._running), self._batch.max_sequence_length
        filling = any(queued.state == "prefilling" and len(queued.row) == limit for queued in self._running)
        if filling and not self._steps.plan.can_start_at(first):
            return []  # its slot will be full, and then the slot behind it could not be reached by an aligned view
        free = self._steps.cache.max_batch_size - first
        self._returning = [queued for queued in self._returning if queued.state == "queued"]
        found = self._returning[:free]
        if not self._waiting or len(found) == free:
            return found
        held = Counter(queued.client for queued in (*self._running, *found))
        new = self._waiting.first(free - len(found), held)
        if any(queued.state != "queued" for queued in new):  # the last step, or cancel(), was interrupted before these had left
            self._leave_queue([queued for queued in new if queued.state != "queued"])
            return self._next_waiting()
        return found + new

    def _leave_queue(self, requests: Sequence[QueuedRequest]) -> None:
        """Take requests that have a slot now, or have ended, out of their lines. Their clients have had a turn."""
        for queued in requests:
            if self._waiting.discard(queued.client, queued):
                self._waiting.end_turn(queued.client)

    def _resume(self) -> list[QueuedRequest]:
        """Choose tokens from logits that were kept, and return the requests that have advanced."""
        advanced = []
        for slot, queued in enumerate(self._running):
            if queued.state == "decoding" and queued.request.waits:
                choice = queued.request.resume()
                if choice is not None:
                    self._take(slot, queued.request.take(choice))
                    advanced.append(queued)
        return advanced

    def _admit(self, admitted: Sequence[QueuedRequest]) -> None:
        """Give each a slot behind the others, and what the prompt cache has of its prompt."""
        if not admitted:
            return
        rows, samplers = [queued.row for queued in admitted], [queued.request.sampler for queued in admitted]
        self._batch.add(rows, samplers, anew=[queued.is_scored for queued in admitted])
        first = len(self._running)
        self._running = [*self._running, *admitted]
        for queued, reused in zip(admitted, self._batch.reused[first:], strict=True):
            queued.begin(reused)
        for slot in range(first, len(self._running)):
            self._shared_prompts.assign(slot, self._running, range(slot))

    def _prefill(self) -> list[QueuedRequest]:
        """Run one chunk of every prompt that is not in its slot yet, and return the requests that have advanced."""
        self._shared_prompts.take(self._running)
        scored = [queued.state == "prefilling" and queued.is_scored for queued in self._running]
        if not any(scored):
            return self._prefill_some([True] * len(scored), every_logit=False)
        if not all(map(self._steps.plan.can_start_at, range(len(scored)))):
            return self._prefill_some([True] * len(scored), every_logit=True)
        others = [not one for one in scored]
        return self._prefill_some(scored, every_logit=True) + self._prefill_some(others, every_logit=False)

    def _prefill_some(self, taking_part: Sequence[bool], *, every_logit: bool) -> list[QueuedRequest]:
        """Run one chunk of those prompts, and return the requests that have advanced."""
        held = self._batch.held
        rows = [
            self._next_row(queued, count) if takes else [] for queued, count, takes in zip(self._running, held, taking_part, strict=True)
        ]
        if not any(rows):
            return []
        chunks = _first_round(self._batch.plan_prefill(held, rows, every_logit=every_logit))
        done = list(held)

        def receive(slot: int, logits: Logits) -> None:
            if self._running[slot].is_scored:
                self._running[slot].take_prompt_logits(done[slot], logits)
            done[slot] += len(logits)

        logits = self._batch.prefill(rows, chunks, receive=receive if every_logit else None)
        advanced = []
        for slot, (queued, row, before, after) in enumerate(zip(self._running, rows, held, self._batch.held, strict=True)):
            if after > before:
                advanced.append(queued)
            if row and after == before + len(row):
                is_whole = after == len(queued.row)
                if is_whole != self._batch.remembers_before_last:
                    self._batch.remember([slot])
                if is_whole:
                    for equal in (slot, *self._shared_prompts.take_whole(slot, self._running)):
                        self._running[equal].stage = "decoding"
                        self._choose_first(equal, logits[slot])
                        if equal != slot:
                            advanced.append(self._running[equal])
        return advanced

    def _next_row(self, queued: QueuedRequest, held: int) -> Sequence[int]:
        """Return what is to be run next of a prompt: all that its slot does not hold, or less where states are to be copied first."""
        if queued.state != "prefilling" or queued.shared:
            return []
        row, end = queued.row, self._shared_prompts.stop(queued, self._running, held)
        if self._batch.remembers_before_last and held < len(row) - 1:
            end = min(end, len(row) - 1)
        return row[held:end]

    def _decode(self, decoding: Sequence[bool]) -> list[QueuedRequest]:
        """Run the last token of the requests that are decoding; the other slots are idle in this step."""
        requests = [queued.request for queued in self._running]
        # When a request ends, its slot is filled by moving another one, and nothing can be kept of a step ahead.
        ahead = all(decoding) and all(request.remaining > 1 for request in requests)
        slots = itertools.compress(range(len(decoding)), decoding)
        tokens = self._token_steps.step_without_waiting(requests, decoding, ahead=ahead)
        chosen = {slot: token for slot, token in zip(slots, tokens, strict=True) if token is not None}
        for slot, token in chosen.items():
            self._take(slot, token)
        return [self._running[slot] for slot in chosen]

    @nvtx_range("sampling")
    def _choose_first(self, slot: int, logits: np.ndarray[Any, Any]) -> None:
        """Choose the first token of a slot's request, unless it waits for a logits processor."""
        request = self._running[slot].request
        self._take(slot, request.take(request.choose_or_keep(logits, full=self._batch.is_full(slot))))

    def _take(self, slot: int, token: GeneratedToken | None) -> None:
        """Record the next token of a slot's request; None if it waits for a logits processor."""
        if token is None:
            return
        queued = self._running[slot]
        queued.add(token)
        self._batch.record_token(slot, queued.last_token, queued.request.sampler, generated=queued.request.generated)
        if queued.finished:
            self._batch.remember([slot])

    @contextmanager
    def _track_slot_owner(self) -> Iterator[None]:
        """Record that the slots are those of the running requests: after the block, or if they were before and it undid all it did."""
        held, owned = self._batch.held, self._own_changes == self._batch.changes
        self._own_changes = None
        try:
            yield
        except BaseException:
            if owned and self._batch.held == held:
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
