"""``VerifySteps``: run tokens and drafts in one enqueue, and accept the first tokens of each draft that equal the chosen ones.

If a draft model or head and the large model choose their tokens on the device, the next drafts and their verification are enqueued before
the host waits for the tokens of a verification.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trt_kvcache._util.nvtx_ranges import nvtx_range
from trt_kvcache.engine.decoder_profiles import VERIFY_WIDTH
from trt_kvcache.errors import KVCacheError
from trt_kvcache.generation.draft_tree import DraftTree
from trt_kvcache.generation.request import Choice, Request
from trt_kvcache.generation.verify_sampler import SampledPositions, VerifySampler
from trt_kvcache.kernels.draft_kernels import accept_drafts_kernel, place_drafts_kernel
from trt_kvcache.session.batch import Batch
from trt_kvcache.session.chunks import Chunk, from_first_slot
from trt_kvcache.session.cursors import Cursor, Cursors, cursors_of, still_holds
from trt_kvcache.session.draft_pace import DraftPace, VerifiedDrafts
from trt_kvcache.session.draft_plan import DraftPlan, draft_limit
from trt_kvcache.session.drafted_rows import DraftedRow, DraftedRows
from trt_kvcache.session.drafts_ahead import AheadPlan, ChosenTokens
from trt_kvcache.session.model_drafter import DraftToContinue, EnqueuedDrafts, ModelDrafter
from trt_kvcache.session.runner import Runner
from trt_kvcache.session.slots import Slot
from trt_kvcache.session.step_plan import LogitsWanted, Rows, StepPlan


@dataclass(eq=False)
class Verification:
    """A verification that was enqueued, and is not read."""

    drafts: DraftPlan
    sampled: SampledPositions | KVCacheError
    #: The requests that it has run. Of one ahead they are known once the verification before it is read.
    cursors: Cursors = ()


@dataclass(frozen=True, eq=False)
class VerifiedRows:
    """Rows that an enqueue has run to verify drafts, and that are not committed yet."""

    plan: StepPlan
    #: Indices of the tokens of each row to commit: its first one, and those of the draft that were accepted.
    paths: Rows
    drafts: VerifiedDrafts
    #: The verification of the next drafts, if it runs already. Its rows lie past these.
    following: Verification | None = None


@dataclass(frozen=True)
class _NextDrafts:
    """The next drafts of the slots that a verification runs, as planned before the host knows the accepted tokens."""

    drafter: ModelDrafter
    plan: AheadPlan
    chunk: Chunk
    limits: Mapping[int, int]


class VerifySteps:
    """Verifies drafts, and keeps the verification that runs ahead."""

    def __init__(self, runner: Runner, batch: Batch, pace: DraftPace) -> None:
        self._runner, self._batch, self._pace = runner, batch, pace
        self._sampler: VerifySampler | None = None
        self._rows: DraftedRows | None = None
        self._ahead: Verification | None = None

    @nvtx_range("verify")
    def run(
        self, slots: Sequence[Slot], requests: Sequence[Request], drafts: DraftPlan, *, on_device: bool, ahead: bool, waits: bool
    ) -> tuple[Mapping[int, Sequence[Choice]], VerifiedRows]:
        """Run tokens and drafts, and choose: on the device if ``on_device``, with the next step enqueued if ``ahead``; else on the host."""
        started = time.perf_counter()
        if on_device:
            verification = Verification(drafts, self._sample(requests, drafts), cursors_of(requests, drafts.plan))
            return self._read(verification, slots, requests, started, ahead=ahead)
        self._run_drafts(drafts)
        logits, first = self._runner.every_logit(drafts.chunk), drafts.chunk.first
        seconds = time.perf_counter() - started
        verified = {
            slot: requests[slot].choose_verified(
                logits[slot - first, : len(drafts.drafts[slot]) + 1], drafts.drafts[slot], room=self._room(slots[slot]), waits=waits
            )
            for slot in drafts.plan.running()
        }
        return self._counted(requests, drafts, verified, seconds, None)

    def is_in_flight(self, requests: Sequence[Request], plan: StepPlan) -> bool:
        """Tell whether a verification ahead runs the tokens of a plan, and nothing has overwritten its rows since."""
        step = self._ahead
        return step is not None and self._runner.uncommitted is step and still_holds(cursors_of(requests, plan), step.cursors)

    @nvtx_range("verify")
    def run_ahead(
        self, slots: Sequence[Slot], requests: Sequence[Request], plan: StepPlan, *, ahead: bool
    ) -> tuple[Mapping[int, Sequence[Choice]], VerifiedRows]:
        """Take the verification that is in flight as the step of a plan of one token for each slot."""
        started = time.perf_counter()
        assert self._ahead is not None
        drafts = self._ahead.drafts
        rows = [(*row, *drafts.drafts[slot].tokens) if row else () for slot, row in enumerate(plan.rows)]
        # On the device a request that has ended continues, for nothing limits it there. The next step begins with what the host knows.
        is_same = all(bool(row) == bool(len(draft)) for row, draft in zip(plan.rows, drafts.drafts, strict=True))
        drafts = drafts._replace(plan=StepPlan.of(rows, LogitsWanted.ALL))
        verification = Verification(drafts, self._ahead.sampled, self._ahead.cursors)
        return self._read(verification, slots, requests, started, ahead=ahead and is_same)

    def _read(
        self, verification: Verification, slots: Sequence[Slot], requests: Sequence[Request], started: float, *, ahead: bool
    ) -> tuple[Mapping[int, Sequence[Choice]], VerifiedRows]:
        """Enqueue the next drafts and their verification, then wait for the tokens of this one."""
        self._ahead = None  # in case of an interrupt, nothing is known
        self._runner.uncommitted = None
        if isinstance(verification.sampled, KVCacheError):
            raise verification.sampled
        planned = self._next_drafts(verification, slots, requests) if ahead else None
        following = None if planned is None else self._follow(verification, planned)
        self._runner.before_wait()
        drafts, sampled = verification.drafts.read(), verification.sampled.read()
        seconds, first = time.perf_counter() - started, drafts.chunk.first
        verified = {
            slot: requests[slot].receive_verified(sampled[slot - first], drafts.drafts[slot], room=self._room(slots[slot]))
            for slot in drafts.plan.running()
        }
        if following is not None and planned is not None:
            chosen = {slot: _tokens(choices) for slot, (choices, _) in verified.items()}
            if not isinstance(following.sampled, KVCacheError):
                planned.drafter.settle({requests[slot]: tokens for slot, tokens in chosen.items()})
            following.cursors = [
                _cursor_after(cursor, drafts.drafts[slot], chosen[slot]) if slot in chosen and cursor is not None else None
                for slot, cursor in enumerate(verification.cursors)
            ]
            self._ahead = following
        return self._counted(requests, drafts, verified, seconds, following)

    def _counted(
        self,
        requests: Sequence[Request],
        drafts: DraftPlan,
        verified: Mapping[int, tuple[Sequence[Choice], Sequence[int]]],
        seconds: float,
        following: Verification | None,
    ) -> tuple[Mapping[int, Sequence[Choice]], VerifiedRows]:
        """Count the drafts of a step, and return choices and rows to commit."""
        choices = {slot: found for slot, (found, _) in verified.items()}
        paths: list[Sequence[int]] = [verified[slot][1] if slot in verified else () for slot in range(len(drafts.plan.rows))]
        self._batch.count_step(sum(map(len, paths)), seconds)
        proposed = accepted_tokens = 0
        for slot, chosen in choices.items():
            draft, drafting, tokens = drafts.drafts[slot], requests[slot].drafting, _tokens(chosen)
            if not len(draft) or not tokens or drafting is None:
                continue
            accepted = draft.num_equal(tokens)
            # A request that ends, or waits for a logits processor, says nothing of the rest of its draft.
            count, depth = (accepted, accepted) if accepted == len(tokens) else (len(draft), draft.depth)
            drafting.record(count, accepted, depth=depth)
            self._batch.count_draft(count, accepted)
            proposed, accepted_tokens = proposed + depth, accepted_tokens + accepted
        counts = VerifiedDrafts(proposed, accepted_tokens, max(draft.depth for draft in drafts.drafts))
        return choices, VerifiedRows(drafts.plan, paths, counts, following)

    def _room(self, slot: Slot) -> int:
        """Return how many tokens of a draft a slot has room for."""
        return self._batch.max_sequence_length - slot.length - 1

    # --- enqueues ---

    def _run_drafts(self, drafts: DraftPlan) -> None:
        """Enqueue tokens and drafts that the host has."""
        plan, chunk = drafts.plan, drafts.chunk
        parents = None if plan.parents is None else plan.parents[chunk.first : chunk.end]
        self._runner.run(chunk, plan.rows[chunk.first : chunk.end], every_logit=True, parents=parents)

    def _sample(self, requests: Sequence[Request], drafts: DraftPlan) -> SampledPositions:
        """Enqueue tokens and drafts, and choose on the device at the position of each row: only tokens come to the host. Does not wait."""
        runner, chunk, enqueued = self._runner, drafts.chunk, drafts.enqueued
        sampler, num_rows = self._sampler_for(chunk), chunk.count * chunk.width
        positions = [
            requests[slot].positions((0, *drafts.drafts[slot].depths)) if drafts.plan.rows[slot] else None
            for slot in range(chunk.first, chunk.end)
        ]
        ids, logits = runner.device_views(num_rows)
        if enqueued is None:
            self._run_drafts(drafts)
            return sampler.choose(logits, positions, chunk.width, stream=runner.stream)
        rows = [
            None if one is None else DraftedRow(drafts.plan.rows[slot][0], len(drafts.drafts[slot]), enqueued.slots.get(slot, 0), one)
            for slot, one in enumerate(positions, start=chunk.first)
        ]
        if self._rows is None:
            starts = runner.starts(runner.cache.max_batch_size)
            self._rows = DraftedRows(runner.cache.memory, starts=starts, stream=runner.stream)
        placed = self._rows.write(rows, stream=runner.stream)
        place_drafts_kernel(placed, enqueued.in_flight.table, ids, sampler.params, chunk.width, runner.stream)
        runner.run_from_device(chunk)
        # An enqueue from slot 0 reads the lengths of the cache, not ``starts``; accept_drafts_kernel counts on from ``starts``.
        if not chunk.first:
            runner.cache.memory.copy_rows(placed.starts, runner.cache.kv_cache_lengths, [(0, 0, chunk.count)], stream=runner.stream)
        return sampler.choose_from_device(logits, positions, chunk.width, stream=runner.stream)

    def _sampler_for(self, chunk: Chunk) -> VerifySampler:
        """Return a sampler for the rows of an enqueue."""
        if self._sampler is None or self._sampler.max_rows < chunk.count * chunk.width:
            if self._sampler is not None:
                self._runner.synchronize()  # a step ahead that was dropped may still run
                self._sampler.close()
                self._sampler = None
            cache, vocab_size = self._runner.cache, self._runner.plan.vocab_size
            # Drafts grow and shrink: only a tree has more tokens than this.
            max_rows = cache.max_batch_size * max(chunk.width, min(VERIFY_WIDTH, self._runner.plan.max_logits_per_slot))
            self._sampler = VerifySampler(cache.memory, max_rows=max_rows, vocab_size=vocab_size, stream=self._runner.stream)
        return self._sampler

    def _next_drafts(self, verification: Verification, slots: Sequence[Slot], requests: Sequence[Request]) -> _NextDrafts | None:
        """Plan the next drafts; None if a request may end, has no draft now or next, or if a slot may lack room."""
        runner, drafts = self._runner, verification.drafts
        running = [*drafts.plan.running()]
        if drafts.enqueued is None or drafts.chunk.first or runner.has_states:
            return None
        verified, lengths = {}, [slot.length for slot in slots]
        draftings = [drafting for slot in running if (drafting := requests[slot].drafting) is not None]
        step_limit = self._pace.limit(len(running), draftings)
        for slot in running:
            request, asked = requests[slot], len(drafts.drafts[slot])
            limit = min(draft_limit(request, step_limit), runner.plan.max_logits_per_slot - 1)
            if not asked or limit < 1 or request.remaining <= asked + 1:
                return None
            verified[slot] = DraftToContinue(request, slots[slot].length, asked, limit)
            lengths[slot] += asked + 1
            if lengths[slot] + 1 + limit > self._batch.max_sequence_length:
                return None
        rows = [[0] * (1 + verified[slot].limit) if slot in verified else () for slot in range(len(slots))]
        [own, *more] = runner.chunks(lengths, StepPlan.of(rows, LogitsWanted.ALL))
        chunk = from_first_slot(own, lengths, self._batch.max_sequence_length)
        assert self._sampler is not None
        if more or chunk is None or chunk.count * chunk.width > self._sampler.max_rows:
            return None
        drafter = next(one.request.drafting.drafter for one in verified.values() if one.request.drafting is not None)
        assert isinstance(drafter, ModelDrafter)
        plan = drafter.plan_ahead(verified)
        limits = {slot: one.limit for slot, one in verified.items()}
        return None if plan is None else _NextDrafts(drafter, plan, chunk, limits)

    def _follow(self, verification: Verification, planned: _NextDrafts) -> Verification:
        """Enqueue drafts and a verification after tokens that only the device knows. An error is raised when that step is taken."""
        all_slots = range(len(verification.drafts.plan.rows))
        drafts = [DraftTree.chain([0] * planned.limits.get(slot, 0)) for slot in all_slots]
        empty = StepPlan.of([()] * len(drafts), LogitsWanted.ALL)
        try:
            enqueued = self._draft_ahead(verification.drafts.chunk, planned)
            return Verification(DraftPlan(empty, planned.chunk, drafts, enqueued), self._sample_ahead(verification, planned, enqueued))
        except KVCacheError as error:
            return Verification(DraftPlan(empty, planned.chunk, drafts), error)

    def _draft_ahead(self, chunk: Chunk, planned: _NextDrafts) -> EnqueuedDrafts:
        """Accept the drafts of a verification on the device, and enqueue the next ones."""
        runner = self._runner
        assert self._rows is not None
        assert self._sampler is not None
        ids, _ = runner.device_views(chunk.count * chunk.width)
        slots = self._rows.slots(chunk.count)
        accept_drafts_kernel(slots, ids, self._sampler.results, chunk.width, runner.stream)
        hidden = None if runner.hidden_states is None else runner.hidden_states.of_step
        return planned.drafter.run_ahead(planned.plan, ChosenTokens(slots, self._sampler.results, chunk.width, hidden))

    def _sample_ahead(self, verification: Verification, planned: _NextDrafts, enqueued: EnqueuedDrafts) -> SampledPositions:
        """Enqueue the verification of drafts after tokens that are only on the device, and choose."""
        runner, chunk = self._runner, planned.chunk
        assert self._rows is not None
        assert self._sampler is not None
        asked = [(planned.limits[slot], enqueued.slots[slot]) if slot in planned.limits else None for slot in range(chunk.count)]
        placed = self._rows.write_ahead(asked, stream=runner.stream)
        ids, logits = runner.device_views(chunk.count * chunk.width)
        place_drafts_kernel(placed, enqueued.in_flight.table, ids, self._sampler.params, chunk.width, runner.stream)
        runner.run_ahead(chunk.count, chunk.width, every_logit=True)
        positions = [
            None if cursor is None or one is None else cursor.request.positions(range(one[0] + 1))
            for one, cursor in zip(asked, verification.cursors, strict=False)
        ]
        return self._sampler.choose_from_device(logits, positions, chunk.width, stream=runner.stream)

    def close(self) -> None:
        """Release the sampler and the rows. Idempotent."""
        self._ahead = None
        for owner in (self._sampler, self._rows):
            if owner is not None:
                owner.close()


def _tokens(choices: Sequence[Choice]) -> list[int]:
    return [choice.token.token for choice in choices if choice.token is not None]


def _cursor_after(cursor: Cursor, draft: DraftTree, chosen: Sequence[int]) -> Cursor | None:
    """Return the cursor from which the device goes on; None if it accepted more than the request takes, which then ends or fails."""
    return cursor.following(len(chosen)) if draft.num_equal(chosen) < len(chosen) else None
