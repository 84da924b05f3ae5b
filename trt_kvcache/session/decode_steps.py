"""``DecodeSteps``: run one token of each request and choose the next one, on the host, or on the device and one step ahead.

Steps with drafts (speculative decoding) are those of :class:`VerifySteps`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

from trt_kvcache._util.nvtx_ranges import nvtx_range
from trt_kvcache.errors import KVCacheError
from trt_kvcache.generation.device_sampler import DeviceSampler, SampledTokens
from trt_kvcache.generation.drafting import Drafting
from trt_kvcache.generation.request import Choice, Request
from trt_kvcache.kernels.sampling_workspace import MAX_VOCAB_SIZE
from trt_kvcache.session.batch import Batch, Logits
from trt_kvcache.session.cursors import Cursor, Cursors, cursors_of, still_holds
from trt_kvcache.session.draft_pace import DraftPace, VerifiedDrafts
from trt_kvcache.session.draft_plan import DraftPlan, plan_drafts
from trt_kvcache.session.runner import Runner
from trt_kvcache.session.slots import Slot
from trt_kvcache.session.step_plan import StepPlan
from trt_kvcache.session.verify_steps import VerifiedRows, VerifySteps


@dataclass(frozen=True, eq=False)
class _StepAhead:
    """A step that was enqueued and is not committed, with the requests that it assumes."""

    cursors: Cursors
    sampled: SampledTokens | KVCacheError


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
        self._pace = DraftPace(measures=not runner.cache.memory.is_host)
        self._prefill_tokens = 0
        self._verify_steps = VerifySteps(runner, batch, self._pace)
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
            self._pace.skip()
            return self._choose(*self._run_again(slots, plan), requests, plan, waits=waits)
        draftings = [request.drafting for request in compress(requests, plan.rows) if request.drafting is not None]
        if not draftings:
            self._pace.skip()
            return self._run_or_verify(slots, requests, plan, None, on_device=False, ahead=ahead, waits=waits)
        running, tries = sum(map(bool, plan.rows)), False
        has_prompt, self._prefill_tokens = self._prefill_tokens != self._batch.prefill_tokens, self._batch.prefill_tokens
        if self._verify_steps.is_in_flight(requests, plan):
            step = self._verified(slots, *self._verify_steps.run_ahead(slots, requests, plan, ahead=ahead))
        else:
            on_device = self._chooses_positions(requests, plan)
            drafts, tries = self._drafts(slots, requests, plan, draftings, on_device=on_device)
            step = self._run_or_verify(slots, requests, plan, drafts, on_device=on_device, ahead=ahead, waits=waits)
        verified = VerifiedDrafts() if step.verified is None else step.verified.drafts
        self._pace.count(running, verified, tried=tries, has_prompt=has_prompt)
        return step

    def _drafts(
        self, slots: Sequence[Slot], requests: Sequence[Request], plan: StepPlan, draftings: Sequence[Drafting], *, on_device: bool
    ) -> tuple[DraftPlan | None, bool]:
        """Return the drafts that the next step verifies, if any, and True if it tries them although they do not pay."""
        running = sum(map(bool, plan.rows))
        limit, tries = self._pace.limit(running, draftings), False
        if not limit:
            limit, tries = self._pace.try_limit(running), True
        drafts = plan_drafts(self._runner, slots, requests, plan, limit, on_device=on_device) if limit else None
        if drafts is None or tries or drafts.enqueued is not None or self._pay(running, requests, drafts):
            return drafts, tries
        return (drafts, True) if self._pace.try_limit(running) else (None, False)

    def _pay(self, running: int, requests: Sequence[Request], drafts: DraftPlan) -> bool:
        """Tell whether drafts pay as they are: some requests may have none, and others shorter ones than they were asked for."""
        found = [(requests[slot].drafting, draft.depth) for slot, draft in enumerate(drafts.drafts) if len(draft)]
        return self._pace.pay(running, [(drafting, depth) for drafting, depth in found if drafting is not None])

    def _run_or_verify(
        self,
        slots: Sequence[Slot],
        requests: Sequence[Request],
        plan: StepPlan,
        drafts: DraftPlan | None,
        *,
        on_device: bool,
        ahead: bool,
        waits: bool,
    ) -> DecodeStep:
        if self.on_device and all(request.fits_device for request in compress(requests, plan.rows)):
            cursors = cursors_of(requests, plan)
            # A step ahead that is in flight is used. These drafts are dropped, and the drafter is asked again for the next step.
            if drafts is None or self._is_in_flight(cursors):
                return self._run_on_device(slots, plan, cursors, ahead=ahead and drafts is None)
        if drafts is not None:
            return self._verified(slots, *self._verify_steps.run(slots, requests, drafts, on_device=on_device, ahead=ahead, waits=waits))
        return self._choose(*self._run_on_host(slots, plan), requests, plan, waits=waits)

    def _verified(self, slots: Sequence[Slot], choices: Mapping[int, Sequence[Choice]], verified: VerifiedRows) -> DecodeStep:
        self._runner.uncommitted = verified
        return DecodeStep(slots, choices, verified)

    def commit(self, verified: VerifiedRows, slots: Sequence[Slot]) -> list[Slot]:
        """Commit the accepted tokens of a step, pending in slots, and return the slots. Inside ``Runner.work(continues=True)``."""
        self._batch.commit_paths(verified.plan, [slot.length for slot in slots], verified.paths)
        self._runner.uncommitted = verified.following
        return [slot.committed(len(path)) for slot, path in zip(slots, verified.paths, strict=True)]

    def _run_again(self, slots: Sequence[Slot], plan: StepPlan) -> tuple[list[Slot], Mapping[int, Logits]]:
        """Run several pending tokens of a slot, as a prompt."""
        return self._batch.prefilled(slots, plan, self._runner.chunks([slot.length for slot in slots], plan))

    def _chooses_positions(self, requests: Sequence[Request], plan: StepPlan) -> bool:
        """Tell whether the device chooses at all positions of drafts."""
        return self.on_device and all(request.fits_positions for request in compress(requests, plan.rows))

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
        return self._ahead is not None and self._runner.uncommitted is self._ahead and still_holds(cursors, self._ahead.cursors)

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
        self._verify_steps.close()
        if self._sampler is not None:
            self._sampler.close()
