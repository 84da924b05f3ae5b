"""``Scheduler``: which requests have a slot, and what each slot runs in the next step. It plans, and touches neither device nor slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from trt_kvcache._util.turns import Turns
from trt_kvcache.session.batch import Batch
from trt_kvcache.session.queued_request import QueuedRequest
from trt_kvcache.session.runner import Runner
from trt_kvcache.session.shared_prompts import SharedPrompts
from trt_kvcache.session.step_outcome import StepOutcome
from trt_kvcache.session.step_plan import LogitsWanted, StepPlan


class Scheduler:
    """Requests that wait for a slot, and those that have one. Clients take turns; of one client, first in, first out."""

    def __init__(self, runner: Runner, batch: Batch, shared_prompts: SharedPrompts, *, prefill_chunk: int) -> None:
        self._runner = runner
        self._batch = batch
        self._shared_prompts = shared_prompts
        self._prefill_chunk = prefill_chunk
        #: Requests that have not had a slot. A request that gets one leaves by the end of the step.
        self.waiting: Turns[QueuedRequest] = Turns()
        #: Requests that had a slot when another call took the slots: first of all.
        self.returning: list[QueuedRequest] = []
        #: Requests that have a slot, by slot.
        self.running: list[QueuedRequest] = []

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a slot."""
        return len(self.waiting) + sum(queued.state == "queued" for queued in self.returning)

    # --- slots that become free ---

    def take_back(self) -> None:
        """Return all running requests to the queue: another call has taken their slots."""
        again = sorted((queued for queued in self.running if not queued.finished), key=lambda queued: queued.index)
        for queued in again:
            queued.progress = queued.progress._replace(stage="queued")
        self.returning = [*again, *(queued for queued in self.returning if queued not in again)]
        self.running = []

    def compaction(self) -> list[int] | None:
        """Return the mapping that moves the last slots to the places of requests that have ended, or None if none has."""
        keep = [not queued.finished for queued in self.running]
        if all(keep):
            return None
        count = sum(keep)
        holes = (slot for slot in range(count) if not keep[slot])
        return [-1 if not kept else slot if slot < count else next(holes) for slot, kept in enumerate(keep)]

    def compacted(self, mapping: Sequence[int]) -> None:
        """Take note of a compaction. The clients of requests that have ended have had a turn."""
        before = self.running
        self.running = [before[slot] for _, slot in sorted((new, slot) for slot, new in enumerate(mapping) if new >= 0)]
        for queued, new in zip(before, mapping, strict=True):
            if new < 0:
                self.waiting.end_turn(queued.client)

    # --- slots that are filled ---

    def next_waiting(self) -> list[QueuedRequest]:
        """Return the requests that get a slot now. They stay in the queue until the step is done."""
        first, limit = len(self.running), self._batch.max_sequence_length
        if not self.waiting and not self.returning:
            return []
        full = any((queued.state == "prefilling" or queued.request.waits) and len(queued.row) == limit for queued in self.running)
        if full and not self._runner.plan.can_start_at(first):
            return []  # its slot is full, or will be, and then no aligned view could start at the slot after it
        free = self._runner.cache.max_batch_size - first
        self.returning = [queued for queued in self.returning if queued.state == "queued"]
        found = self.returning[:free]
        if not self.waiting or len(found) == free:
            return found
        held = Counter(queued.client for queued in (*self.running, *found))
        new = self.waiting.first(free - len(found), held)
        if any(queued.state != "queued" for queued in new):  # the last step, or cancel(), was interrupted before these had left
            self.leave_queue([queued for queued in new if queued.state != "queued"])
            return self.next_waiting()
        return found + new

    def leave_queue(self, requests: Sequence[QueuedRequest]) -> None:
        """Take requests that have a slot now, or have ended, out of their lines. Their clients have had a turn."""
        for queued in requests:
            if self.waiting.discard(queued.client, queued):
                self.waiting.end_turn(queued.client)

    # --- tokens that run ---

    def plan_decode(self) -> StepPlan:
        """Return the last token of each request that is decoding and has not kept its logits."""
        decodes = [queued.state == "decoding" and not queued.request.waits for queued in self.running]
        return StepPlan.of([(queued.request.last_token,) if one else () for queued, one in zip(self.running, decodes, strict=True)])

    def plan_prefill(self, outcome: StepOutcome) -> list[StepPlan]:
        """Return the prompt tokens of the next step. Scored prompts run apart from the others where an enqueue may start at any slot."""
        rows = [self._next_row(outcome, slot) for slot in range(len(outcome.slots))]
        if any(rows) and _has_decodes(outcome):
            rows = self._beside_decodes(outcome, rows)
        scored = [bool(row) and queued.is_scored for row, queued in zip(rows, outcome.running, strict=True)]
        alone = StepPlan.of([row if is_scored else [] for row, is_scored in zip(rows, scored, strict=True)], LogitsWanted.ALL)
        others = StepPlan.of([[] if is_scored else row for row, is_scored in zip(rows, scored, strict=True)])
        if any(scored) and not all(map(self._runner.plan.can_start_at, range(len(rows)))):
            wanted = [(alone if is_scored else others).logits[slot] for slot, is_scored in enumerate(scored)]
            return [StepPlan.of(rows)._replace(logits=wanted)]
        return [plan for plan in (alone, others) if any(plan.rows)]

    def _beside_decodes(self, outcome: StepOutcome, rows: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Return the rows that run next to requests that decode, which wait for them: rows of the oldest prompt, and of its neighbours."""
        # An enqueue computes a rectangle of slots and tokens: with a long prompt next to short ones, or slots between, most of it in vain.
        # The number of slots is a power of two, so that few shapes of steps are captured.
        prompts = [slot for slot, row in enumerate(rows) if row]
        first, count = min(prompts, key=lambda slot: outcome.running[slot].index), 1
        width = min(len(rows[first]), self._prefill_chunk)
        while first + 2 * count <= len(rows) and all(rows[first : first + 2 * count]) and 2 * count * width <= self._prefill_chunk:
            count *= 2
        return [row if first <= slot < first + count else [] for slot, row in enumerate(rows)]

    def prefill_limit(self, outcome: StepOutcome, plan: StepPlan) -> int | None:
        """Return the most tokens of each prompt next to requests that decode, so that these do not wait for long; None without any."""
        return max(1, self._prefill_chunk // sum(map(bool, plan.rows))) if _has_decodes(outcome) else None

    def _next_row(self, outcome: StepOutcome, slot: int) -> Sequence[int]:
        """Return the next tokens of a prompt: all that its slot does not hold, or fewer where states are to be copied first."""
        if outcome.state(slot) != "prefilling" or outcome.progress[slot].shared:
            return []
        row, held = outcome.running[slot].row, outcome.slots[slot].length
        end = self._shared_prompts.stop(outcome, slot)
        if self._batch.caches_prompt_without_last_token and held < len(row) - 1:
            end = min(end, len(row) - 1)
        return row[held:end]


def _has_decodes(outcome: StepOutcome) -> bool:
    """Return True if a request of a step decodes."""
    return any(outcome.state(slot) == "decoding" for slot in range(len(outcome.slots)))
