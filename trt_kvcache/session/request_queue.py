"""``RequestQueue``: submitted prompts share the slots of a session; as one ends, the next takes its slot.

A step plans (:class:`Scheduler`), runs (:class:`Batch` and :class:`DecodeSteps`, over a :class:`StepOutcome`), and applies last.
"""

import logging
import time
from collections.abc import Sequence

from trt_kvcache._util.nvtx_ranges import nvtx_range
from trt_kvcache.generation.request import Request
from trt_kvcache.session.batch import Batch, Logits
from trt_kvcache.session.chunks import Chunk
from trt_kvcache.session.decode_steps import DecodeSteps
from trt_kvcache.session.queued_request import QueuedRequest
from trt_kvcache.session.request_handle import RequestHandle
from trt_kvcache.session.runner import Runner
from trt_kvcache.session.scheduler import Scheduler
from trt_kvcache.session.shared_prompts import SharedPrompts
from trt_kvcache.session.slots import Slot
from trt_kvcache.session.step_outcome import StepOutcome
from trt_kvcache.session.step_plan import StepPlan
from trt_kvcache.session.timeline import Activity, Timeline

#: Seconds that a step without anything to run waits for logits processors: for those of the only request that waits, or of one of several.
_PAUSE, _SHORT_PAUSE = 0.005, 0.001

_LOGGER = logging.getLogger("trt_kvcache.session")


class RequestQueue:
    """The loop of submitted requests. Clients take turns; of one client, first in, first out."""

    def __init__(self, runner: Runner, batch: Batch, decode_steps: DecodeSteps, *, prefill_chunk: int) -> None:
        self._runner = runner
        self._batch = batch
        self._decode_steps = decode_steps
        self._shared_prompts = SharedPrompts(runner, batch)
        self.scheduler = Scheduler(runner, batch, self._shared_prompts, prefill_chunk=prefill_chunk)
        self._num_submitted = 0
        #: The slots as the last step left them. If others are current, another call has taken them.
        self._left: tuple[Slot, ...] | None = None
        #: Records what the slots do, if it is there.
        self.timeline: Timeline | None = None

    @property
    def running(self) -> list[RequestHandle]:
        """The requests that have a slot, by slot. Those that ended in the last step are still among them."""
        return [queued.handle for queued in self.scheduler.running]

    def submit(self, request: Request, *, prompt_logprobs: int | None = None, client: str = "") -> RequestHandle:
        """Put a request at the end of its client's line."""
        self._runner.check_all_batch_sizes()
        request.index = self._num_submitted
        waiting = self.scheduler.waiting
        queued = QueuedRequest(request, prompt_logprobs=prompt_logprobs, client=client, waiting=waiting)
        self._num_submitted += 1
        waiting.add(client, queued)
        seed = f", seed {request.sampler[0]}" if request.sampled else ""
        _LOGGER.info("request %d: %d prompt tokens%s, is number %d in the queue", request.index, len(request.prompt), seed, len(waiting))
        return queued.handle

    def step(self) -> list[RequestHandle]:
        """Advance each request by one token and the accepted ones of its draft, or by one chunk of its prompt."""
        self._free_slots()
        running, admitted = self.scheduler.running, self.scheduler.next_waiting()
        if not running and not admitted:
            return []
        self._runner.checked_lengths()
        begin = self.timeline.now() if self.timeline else 0.0
        decode = self.scheduler.plan_decode()
        if any(decode.rows):
            self._batch.make_room_for_idle_rows(decode)
            self._left = self._runner.slots
        with self._runner.work(continues=not admitted), self._batch.finite():
            outcome = StepOutcome(running, self._runner.slots)
            # First of all, so that one that fails here costs the others nothing.
            self._resume(outcome)
            if admitted:
                self._admit(outcome, admitted)
            self._prefill(outcome)
            if any(decode.rows):
                self._decode(outcome, StepPlan.of([*decode.rows, *(() for _ in admitted)]))
            self._batch.remember(outcome.slots, outcome.ended)
            self._apply(outcome)
        advanced = [outcome.running[slot] for slot in sorted(outcome.advanced)]
        self.scheduler.leave_queue(admitted)
        if self.timeline:
            self._record_step(self.timeline, begin, decode, advanced)
        if _LOGGER.isEnabledFor(logging.INFO):
            self._log_step(admitted)
        waiting = [queued for queued in self.scheduler.running if queued.request.waits and not queued.finished]
        if waiting and not advanced:
            # Of several, another one may be the first to be ready.
            waiting[0].request.ready(_PAUSE if len(waiting) == 1 else _SHORT_PAUSE)
        moved = {queued.index: queued.handle for queued in (*advanced, *waiting)}
        return [moved[index] for index in sorted(moved)]

    # --- slots that become free: before the step, and whether or not it succeeds ---

    def _free_slots(self) -> None:
        """Free the slots of requests that have ended; all slots if another call has taken them."""
        if self._left is self._runner.slots:
            mapping = self.scheduler.compaction()
            if mapping is not None:
                self._compact(mapping)
                if self.timeline:
                    self.timeline.record_moves([queued.index for queued in self.scheduler.running], mapping)
                self.scheduler.compacted(mapping)
                self._left = self._runner.slots
            return
        self.scheduler.take_back()
        if self.scheduler.next_waiting():
            self._batch.clear()
            self._left = self._runner.slots

    def _compact(self, mapping: Sequence[int]) -> None:
        self._runner.checked_lengths()
        with self._runner.work():
            # After an interrupt between two moves, the rows of a dropped slot may be those of another one: from now on it holds none.
            # The slots after such an interrupt are still those of the queue, so no running request starts again.
            self._runner.apply([slot if new >= 0 else Slot([], 0) for slot, new in zip(self._runner.slots, mapping, strict=True)])
            self._left = self._runner.slots
            self._batch.compact(mapping)

    # --- parts of a step: on the host they change only the outcome ---

    def _resume(self, outcome: StepOutcome) -> None:
        """Choose tokens from logits that were kept."""
        for slot, queued in enumerate(outcome.running):
            if queued.request.waits and queued.state == "decoding" and (choice := queued.request.resume()) is not None:
                outcome.choose(slot, [choice])

    def _admit(self, outcome: StepOutcome, admitted: Sequence[QueuedRequest]) -> None:
        """Give each a slot after the others, and what the prompt cache has of its prompt."""
        first, rows = len(outcome.slots), [queued.row for queued in admitted]
        slots = self._batch.added(
            outcome.slots,
            rows,
            adapters=[queued.request.adapter for queued in admitted],
            skip_prompt_cache=[queued.is_scored for queued in admitted],
        )
        samplers = [queued.request.sampler for queued in admitted]
        slots[first:] = [slot._replace(sampler=sampler) for slot, sampler in zip(slots[first:], samplers, strict=True)]
        outcome.admit(admitted, slots, time.perf_counter())
        for queued in admitted:
            queued.request.prepare()
        for slot in range(first, len(slots)):
            self._shared_prompts.assign(outcome, slot, range(slot))

    def _prefill(self, outcome: StepOutcome) -> None:
        """Run one chunk of every prompt that is not in its slot yet."""
        if all(progress.stage != "prefilling" for progress in outcome.progress):
            return
        self._shared_prompts.take(outcome)
        for plan in self.scheduler.plan_prefill(outcome):
            self._run_prefill(outcome, plan)

    def _run_prefill(self, outcome: StepOutcome, plan: StepPlan) -> None:
        before = outcome.held
        chunks = _first_round(self._runner.chunks(before, plan, limit=self.scheduler.prefill_limit(outcome, plan)))
        done = [*before]

        def receive(slot: int, logits: Logits) -> None:
            progress = outcome.progress[slot]
            outcome.progress[slot] = progress._replace(scored=(*progress.scored, *outcome.running[slot].scores(done[slot], logits)))
            done[slot] += len(logits)

        outcome.slots, logits = self._batch.prefilled(outcome.slots, plan, chunks, receive=receive)
        for slot, row in enumerate(plan.rows):
            after = outcome.slots[slot].length
            if after > before[slot]:
                outcome.advanced.add(slot)
            if not row or after < before[slot] + len(row):
                continue
            is_whole = after == len(outcome.running[slot].row)
            if is_whole != self._batch.caches_prompt_without_last_token:
                self._batch.remember(outcome.slots, [slot])
            if is_whole:
                for equal in (slot, *self._shared_prompts.take_whole(outcome, slot)):
                    outcome.progress[equal] = outcome.progress[equal]._replace(stage="decoding")
                    outcome.advanced.add(equal)
                    self._choose_first(outcome, equal, logits[slot])

    @nvtx_range("sampling")
    def _choose_first(self, outcome: StepOutcome, slot: int, logits: Logits) -> None:
        """Choose the first token of a slot's request, unless it waits for a logits processor."""
        outcome.choose(slot, [outcome.running[slot].request.choose_or_keep(logits, full=self._batch.is_full(outcome.slots[slot]))])

    def _decode(self, outcome: StepOutcome, plan: StepPlan) -> None:
        """Run the last token of the requests that are decoding; the other slots are idle in this step."""
        requests = [queued.request for queued in outcome.running]
        # When a request ends, its slot is filled by moving another one, and nothing can be kept of a step ahead.
        ahead = all(plan.rows) and all(request.remaining > 1 for request in requests)
        step = self._decode_steps.run(outcome.slots, requests, plan, ahead=ahead, waits=False)
        outcome.slots = [*step.slots]
        for slot, choices in step.choices.items():
            outcome.choose(slot, choices)
        if step.verified is not None:
            outcome.slots = self._decode_steps.commit(step.verified, outcome.slots)

    # --- apply ---

    def _apply(self, outcome: StepOutcome) -> None:
        """Make an outcome current. This cannot fail. After an interrupt between two assignments, all of them are made again."""
        try:
            self._put_in_force(outcome)
        except BaseException:
            self._put_in_force(outcome)
            raise

    def _put_in_force(self, outcome: StepOutcome) -> None:
        self.scheduler.running = outcome.running
        for queued, progress in zip(outcome.running, outcome.progress, strict=True):
            queued.progress = progress
        for slot, choices in outcome.choices.items():
            for choice in choices:
                outcome.running[slot].take(choice)
        self._runner.apply(outcome.slots)
        self._left = self._runner.slots

    # --- records ---

    def _log_step(self, admitted: Sequence[QueuedRequest]) -> None:
        """Log which requests began and ended in the step that has just ended."""
        for queued, slot in zip(self.scheduler.running, self._runner.slots, strict=True):
            if queued in admitted:
                _LOGGER.info(
                    "request %d: begins in slot %d, %d of its tokens are copies",
                    queued.index,
                    self.scheduler.running.index(queued),
                    slot.reused,
                )
            if queued.finished:
                _LOGGER.info("request %d: ended after %d tokens, %s", queued.index, queued.request.num_tokens, queued.handle.finish_reason)

    def _record_step(self, timeline: Timeline, begin: float, decode: StepPlan, advanced: Sequence[QueuedRequest]) -> None:
        """Record what each slot did in the step that has just ended."""
        moved = set(map(id, advanced))
        did: list[tuple[int, Activity] | None] = [
            (queued.index, "decode" if slot < len(decode.rows) and decode.rows[slot] else "prefill") if id(queued) in moved else None
            for slot, queued in enumerate(self.scheduler.running)
        ]
        timeline.record_step(begin, did, self.scheduler.num_waiting)


def _first_round(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return the first chunks, up to one that has a slot of those before it."""
    found: list[Chunk] = []
    for chunk in chunks:
        if found and chunk.first < found[-1].end:
            break
        found.append(chunk)
    return found
