"""``DecodeSteps``: run one token of each request and choose the next one, on the host, or on the device and one step ahead.

Drafts (speculative decoding) run in the same enqueue, after these tokens. On the device, one launch samples all of
their positions.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

from trt_kvcache._util.nvtx_ranges import nvtx_range
from trt_kvcache.errors import KVCacheError
from trt_kvcache.generation.device_sampler import DeviceSampler, Positions, SampledTokens
from trt_kvcache.generation.request import Choice, Request
from trt_kvcache.generation.verify_sampler import SampledPositions, VerifySampler
from trt_kvcache.kernels.draft_kernels import place_drafts_kernel
from trt_kvcache.kernels.sampling_workspace import MAX_VOCAB_SIZE
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.session.batch import Batch, Logits
from trt_kvcache.session.draft_pace import DraftPace
from trt_kvcache.session.draft_plan import DraftPlan, plan_drafts
from trt_kvcache.session.drafted_rows import DraftedRow, DraftedRows
from trt_kvcache.session.model_drafter import EnqueuedDrafts
from trt_kvcache.session.runner import Runner
from trt_kvcache.session.slots import Slot
from trt_kvcache.session.step_plan import Rows, StepPlan


class Cursor(NamedTuple):
    """A request, and the number of its tokens so far."""

    request: Request
    num_tokens: int

    def following(self) -> Cursor:
        """Return the cursor after one more token."""
        return Cursor(self.request, self.num_tokens + 1)


#: The request of each slot; None for an idle slot.
Cursors = Sequence[Cursor | None]


@dataclass(frozen=True, eq=False)
class _StepAhead:
    """A step that was enqueued and is not committed, with the requests that it assumes."""

    cursors: Cursors
    sampled: SampledTokens | KVCacheError

    def runs(self, cursors: Cursors) -> bool:
        """Tell whether it has run the tokens of these requests. Requests that have ended since do not matter."""
        return all(now is None or now == then for now, then in zip(cursors, self.cursors, strict=False))


@dataclass(frozen=True, eq=False)
class VerifiedRows:
    """Rows that an enqueue has run to verify drafts, and that are not committed yet."""

    plan: StepPlan
    #: Indices of the tokens of each row to commit: its first one, and those of the draft that were accepted.
    paths: Rows


class DecodeStep(NamedTuple):
    """Result of a step: the slots after what was committed, and the choices of each slot in order, several if a draft was accepted."""

    slots: Sequence[Slot]
    choices: Mapping[int, Sequence[Choice]]
    #: To be given to :meth:`DecodeSteps.commit` once the chosen tokens are pending; None if all rows are committed.
    verified: VerifiedRows | None = None


class DecodeSteps:
    """Runs the last token of requests, and chooses their next ones."""

    def __init__(self, runner: Runner, batch: Batch) -> None:
        self._runner = runner
        self._batch = batch
        self._sampler: DeviceSampler | None = None
        # The requests whose history the sampler has, by slot; the step ahead included.
        self._sampled: Mapping[int, Cursor | None] = {}
        self._ahead: _StepAhead | None = None
        self._verify_sampler: VerifySampler | None = None
        self._drafted_rows: DraftedRows | None = None
        # On a CPU, steps take milliseconds of other programs too.
        self._pace = None if runner.cache.memory.is_host else DraftPace()
        #: True if tokens are chosen on the device. Tests set it over host memory.
        self.on_device = not runner.cache.memory.is_host and self.can_be_on_device

    @property
    def can_be_on_device(self) -> bool:
        """True if the engine has ids and logits that a :class:`DeviceSampler` takes."""
        plan = self._runner.plan
        return (plan.input_ids.dtype, plan.logits.dtype) == ("int32", "float32") and plan.vocab_size <= MAX_VOCAB_SIZE

    def run(
        self, slots: Sequence[Slot], requests: Sequence[Request], plan: StepPlan, *, ahead: bool = False, waits: bool = True
    ) -> DecodeStep:
        """Run a plan of the pending tokens of requests, and choose the next tokens. Inside ``Runner.work(continues=True)``.

        Unless it ``waits``, a request whose logits processors are not ready keeps its logits.
        """
        if not all(plan.rows):
            slots = self._batch.with_room_for_idle_rows(slots, plan)
        if plan.is_wide:  # verified rows were overwritten before they were committed
            return self._choose(*self._run_again(slots, plan), requests, plan, waits=waits)
        pace = self._pace if any(request.drafting is not None for request in requests) else None
        running = sum(map(bool, plan.rows))
        drafts = None
        if pace is None or pace.allows(running):
            drafts = plan_drafts(self._runner, slots, requests, plan, on_device=self._chooses_positions(requests, plan))
        step = self._run_or_verify(slots, requests, plan, drafts, ahead=ahead, waits=waits)
        if pace is not None:
            pace.count(running, sum(map(len, step.choices.values())), drafted=step.verified is not None)
        return step

    def _run_or_verify(
        self, slots: Sequence[Slot], requests: Sequence[Request], plan: StepPlan, drafts: DraftPlan | None, *, ahead: bool, waits: bool
    ) -> DecodeStep:
        if self.on_device and all(request.fits_device for request in compress(requests, plan.rows)):
            cursors = [Cursor(one, one.num_tokens) if row else None for one, row in zip(requests, plan.rows, strict=True)]
            # A step ahead that is in flight is not wasted: the draft comes one step later.
            if drafts is None or self._is_in_flight(cursors):
                return self._run_on_device(slots, plan, cursors, ahead=ahead and drafts is None)
        if drafts is not None:
            return self._verify(slots, requests, drafts, waits=waits)
        return self._choose(*self._run_on_host(slots, plan), requests, plan, waits=waits)

    def commit(self, verified: VerifiedRows, slots: Sequence[Slot]) -> list[Slot]:
        """Commit the accepted tokens of a step, pending in slots, and return the slots. Inside ``Runner.work(continues=True)``."""
        self._batch.commit_paths(verified.plan, [slot.length for slot in slots], verified.paths)
        self._runner.uncommitted = None
        return [slot.committed(len(path)) for slot, path in zip(slots, verified.paths, strict=True)]

    def _run_again(self, slots: Sequence[Slot], plan: StepPlan) -> tuple[list[Slot], Mapping[int, Logits]]:
        """Run several pending tokens of a slot, as a prompt."""
        return self._batch.prefilled(slots, plan, self._runner.chunks([slot.length for slot in slots], plan))

    @nvtx_range("verify")
    def _verify(self, slots: Sequence[Slot], requests: Sequence[Request], drafts: DraftPlan, *, waits: bool) -> DecodeStep:
        """Run tokens and drafts in one enqueue, choose, and accept the first tokens of a draft that equal the chosen ones."""
        started = time.perf_counter()
        if self._chooses_positions(requests, drafts.plan):
            in_flight = self._sample_positions(requests, drafts)
            self._runner.before_wait()
            drafts, sampled, logits = drafts.read(), in_flight.read(), None
        else:
            self._run_drafts(drafts)
            logits = self._runner.every_logit(drafts.chunk)
        plan, chunk = drafts.plan, drafts.chunk
        seconds = time.perf_counter() - started
        choices: dict[int, Sequence[Choice]] = {}
        paths: list[Sequence[int]] = [()] * len(slots)
        for slot in plan.running():
            request, draft, place = requests[slot], drafts.drafts[slot], slot - chunk.first
            room = self._batch.max_sequence_length - slots[slot].length - 1
            if logits is None:
                choices[slot], paths[slot] = request.receive_verified(sampled[place], draft, room=room)
            else:
                choices[slot], paths[slot] = request.choose_verified(logits[place, : len(draft) + 1], draft, room=room, waits=waits)
        self._batch.count_step(sum(map(len, paths)), seconds)
        self._record(requests, drafts, choices)
        verified = VerifiedRows(plan, paths)
        self._runner.uncommitted = verified
        return DecodeStep(slots, choices, verified)

    def _chooses_positions(self, requests: Sequence[Request], plan: StepPlan) -> bool:
        """Tell whether the device chooses at all positions of drafts."""
        return self.on_device and all(request.fits_positions for request in compress(requests, plan.rows))

    def _run_drafts(self, drafts: DraftPlan) -> None:
        """Enqueue tokens and drafts that the host has."""
        plan, chunk = drafts.plan, drafts.chunk
        parents = None if plan.parents is None else plan.parents[chunk.first : chunk.end]
        self._runner.run(chunk, plan.rows[chunk.first : chunk.end], every_logit=True, parents=parents)

    def _sample_positions(self, requests: Sequence[Request], drafts: DraftPlan) -> SampledPositions:
        """Enqueue tokens and drafts, and choose on the device at the position of each row: only tokens come to the host. Does not wait."""
        runner, chunk = self._runner, drafts.chunk
        num_rows = chunk.count * chunk.width
        if self._verify_sampler is None or self._verify_sampler.max_rows < num_rows:
            if self._verify_sampler is not None:
                self._verify_sampler.close()
                self._verify_sampler = None
            max_rows, vocab_size = runner.cache.max_batch_size * chunk.width, runner.plan.vocab_size
            self._verify_sampler = VerifySampler(runner.cache.memory, max_rows=max_rows, vocab_size=vocab_size, stream=runner.stream)
        positions = [
            requests[slot].positions((0, *drafts.drafts[slot].depths)) if drafts.plan.rows[slot] else None
            for slot in range(chunk.first, chunk.end)
        ]
        ids, logits = runner.device_views(num_rows)
        if drafts.in_flight is None:
            self._run_drafts(drafts)
            return self._verify_sampler.choose(logits, positions, chunk.width, stream=runner.stream)
        self._place(drafts, drafts.in_flight, positions, ids, self._verify_sampler.params)
        runner.run_from_device(chunk)
        return self._verify_sampler.choose_from_device(logits, positions, chunk.width, stream=runner.stream)

    def _place(
        self,
        drafts: DraftPlan,
        enqueued: EnqueuedDrafts,
        positions: Sequence[Positions | None],
        ids: DeviceTensor,
        params: DeviceTensor,
    ) -> None:
        """Write token ids and parameters of rows whose drafts are on the device only."""
        runner, chunk = self._runner, drafts.chunk
        if self._drafted_rows is None:
            cache = runner.cache
            self._drafted_rows = DraftedRows(cache.memory, max_slots=cache.max_batch_size, stream=runner.stream)
        rows = [
            None if one is None else DraftedRow(drafts.plan.rows[slot][0], len(drafts.drafts[slot]), enqueued.slots.get(slot, 0), one)
            for slot, one in enumerate(positions, start=chunk.first)
        ]
        slots = self._drafted_rows.write(rows, stream=runner.stream)
        place_drafts_kernel(slots, enqueued.in_flight.table, ids, params, chunk.width, runner.stream)

    def _record(self, requests: Sequence[Request], drafts: DraftPlan, choices: Mapping[int, Sequence[Choice]]) -> None:
        """Count the drafts of a step, and set the length of the next one of each request."""
        for slot, chosen in choices.items():
            draft, drafting = drafts.drafts[slot], requests[slot].drafting
            tokens = [choice.token.token for choice in chosen if choice.token is not None]
            if not len(draft) or not tokens or drafting is None:
                continue
            accepted = draft.num_equal(tokens)
            # A request that ends, or waits for a logits processor, says nothing of the rest of its draft.
            verified, depth = (accepted, accepted) if accepted == len(tokens) else (len(draft), draft.depth)
            drafting.record(verified, accepted, requests[slot].num_tokens + len(tokens), depth=depth)
            self._batch.count_draft(verified, accepted)

    @nvtx_range("decode")
    def _run_on_host(self, slots: Sequence[Slot], plan: StepPlan) -> tuple[list[Slot], Logits]:
        started = time.perf_counter()
        runner = self._runner
        runner.enqueue_decode(plan)
        runner.commit(plan.increments)
        after = plan.applied(slots)
        logits = runner.logits(len(plan.rows))
        self._batch.count_step(sum(plan.counts), time.perf_counter() - started)
        return after, logits

    @nvtx_range("sampling")
    def _choose(
        self, slots: Sequence[Slot], logits: Logits | Mapping[int, Logits], requests: Sequence[Request], plan: StepPlan, *, waits: bool
    ) -> DecodeStep:
        choose = Request.choose if waits else Request.choose_or_keep
        is_full = self._batch.is_full
        return DecodeStep(slots, {slot: [choose(requests[slot], logits[slot], full=is_full(slots[slot]))] for slot in plan.running()})

    @nvtx_range("decode")
    def _run_on_device(self, slots: Sequence[Slot], plan: StepPlan, cursors: Cursors, *, ahead: bool) -> DecodeStep:
        started = time.perf_counter()
        runner, batch = self._runner, self._batch
        is_in_flight = self._is_in_flight(cursors)
        step, sampled = self._ahead, self._sampled
        self._ahead, self._sampled = None, {}  # in case of an interrupt, nothing is known
        runner.uncommitted = None
        if step is None or not is_in_flight:
            runner.enqueue_decode(plan)
            # The sampler has counted the tokens of a step that is dropped.
            step, sampled = self._sample(cursors, {} if step is not None else sampled)
        if isinstance(step.sampled, KVCacheError):
            raise step.sampled
        runner.commit(plan.increments)
        after = plan.applied(slots)
        following = None
        if ahead and self._can_follow(cursors, after):
            following, sampled = self._follow(cursors, sampled)
        runner.before_wait()
        found = step.sampled.read()
        batch.count_step(sum(plan.counts), time.perf_counter() - started)
        choices = {
            slot: [cursor.request.receive(found[slot], full=batch.is_full(after[slot]))]
            for slot, cursor in enumerate(cursors)
            if cursor is not None
        }
        self._ahead, self._sampled, runner.uncommitted = following, sampled, following
        return DecodeStep(after, choices)

    def _is_in_flight(self, cursors: Cursors) -> bool:
        """Tell whether a step ahead runs the tokens of these requests, and nothing has overwritten its rows since."""
        return self._ahead is not None and self._runner.uncommitted is self._ahead and self._ahead.runs(cursors)

    def _can_follow(self, cursors: Cursors, slots: Sequence[Slot]) -> bool:
        """Tell whether a next step is sure to have room, and likely to have a request that needs it."""
        taking_part = [(slot, cursor.request) for slot, cursor in zip(slots, cursors, strict=True) if cursor is not None]
        return not any(self._batch.is_full(slot) for slot, _ in taking_part) and any(request.remaining > 1 for _, request in taking_part)

    def _follow(self, cursors: Cursors, sampled: Mapping[int, Cursor | None]) -> tuple[_StepAhead, Mapping[int, Cursor | None]]:
        """Enqueue the step after one whose tokens are only on the device. An error is raised when the turn of that step comes."""
        after = [None if cursor is None else cursor.following() for cursor in cursors]
        try:
            self._runner.enqueue_next((1,) * len(after))
            return self._sample(after, sampled)
        except KVCacheError as error:
            return _StepAhead(after, error), {}

    @nvtx_range("sampling")
    def _sample(self, cursors: Cursors, known: Mapping[int, Cursor | None]) -> tuple[_StepAhead, Mapping[int, Cursor | None]]:
        """Choose the tokens after an enqueue, into the ids of the next one, and send them to the host. Does not wait."""
        stream = self._runner.stream
        if self._sampler is None:
            cache = self._runner.cache
            self._sampler = DeviceSampler(
                cache.memory, max_batch_size=cache.max_batch_size, vocab_size=self._runner.plan.vocab_size, stream=stream
            )
        for slot, cursor in enumerate(cursors):
            if slot not in known or known[slot] != cursor:
                if cursor is None:
                    self._sampler.clear_slot(slot, stream=stream)
                else:
                    cursor.request.enter(self._sampler, slot, stream=stream)
        tokens, logits = self._runner.device_views(len(cursors))
        self._sampler.sample(logits, tokens, stream=stream)
        after = {slot: None if cursor is None else cursor.following() for slot, cursor in enumerate(cursors)}
        return _StepAhead(cursors, self._sampler.download(len(cursors), stream=stream)), after

    def close(self) -> None:
        """Release the samplers. Idempotent."""
        self._ahead, self._sampled = None, {}
        for owner in (self._sampler, self._verify_sampler, self._drafted_rows):
            if owner is not None:
                owner.close()
