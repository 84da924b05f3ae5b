"""``DraftSteps``: generates the drafts of a draft model or head for all slots, one token of each draft at a time.

On a GPU, tokens are chosen on the device and run there: the host enqueues all steps of the drafts, and their verification may follow
before it waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trt_kvcache._util.nvtx_ranges import nvtx_range
from trt_kvcache.engine.decoder_profiles import VERIFY_WIDTH
from trt_kvcache.errors import EngineError
from trt_kvcache.generation.draft_sampler import DraftSampler, SampledDrafts
from trt_kvcache.generation.request import Request
from trt_kvcache.kernels.sampling_workspace import MAX_VOCAB_SIZE
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.session.batch import Batch, Logits
from trt_kvcache.session.chunks import Chunk, from_first_slot
from trt_kvcache.session.runner import Runner
from trt_kvcache.session.slots import Slot
from trt_kvcache.session.step_plan import Rows, StepPlan


class Drafted(NamedTuple):
    """A slot that generates a draft."""

    request: Request
    #: Tokens to run first, at least one.
    tokens: Sequence[int]
    #: Most tokens of the draft, at least 1; of a tree those on a path.
    limit: int
    #: Most tokens of a tree.
    tree_limit: int = 0


#: In the row of a slot, a token that is on the device only.
UNREAD = -1


@dataclass(eq=False)
class DraftsInFlight:
    """Drafts that were enqueued. The slots hold them, with :data:`UNREAD` for their tokens until these are read."""

    #: Most tokens of the draft of each slot: all of them, unless it has an error.
    limits: Mapping[int, int]
    #: ``ROW_RESULT`` of each token, uint8 ``[tokens, slots, 16]``.
    table: DeviceTensor
    _sampled: SampledDrafts
    #: Row of each slot, and the index of the first token of its draft.
    _rows: Mapping[int, tuple[list[int], int]]
    is_read: bool = False

    def read(self) -> dict[int, list[int]]:
        """Wait for the drafts, and return them up to their errors."""
        drafts = {slot: self._sampled.read(slot, limit) for slot, limit in self.limits.items()}
        for slot, (row, first) in self._rows.items():
            # Token 0 has run after an error. The last token of a draft has not run.
            ran = [*drafts[slot], *[0] * (self.limits[slot] - len(drafts[slot]))][:-1]
            row[first : first + len(ran)] = ran
        self.is_read = True
        return drafts


class DraftSteps:
    """Runs tokens of slots and generates drafts after them. Then a slot holds these tokens and its draft, but for the last token."""

    def __init__(self, runner: Runner, batch: Batch, *, vocab_size: int) -> None:
        self._runner, self._batch, self._vocab_size = runner, batch, vocab_size
        #: Of drafts that the device chooses, once there were some.
        self.sampler: DraftSampler | None = None
        self._in_flight: DraftsInFlight | None = None
        #: True if tokens are chosen on the device. Tests set it over host memory.
        self.on_device = not runner.cache.memory.is_host and self.can_be_on_device

    @property
    def can_be_on_device(self) -> bool:
        """True if the engine has ids and logits that a :class:`DeviceSampler` takes, of tokens that the large model has."""
        plan = self._runner.plan
        is_taken = (plan.input_ids.dtype, plan.logits.dtype) == ("int32", "float32")
        return is_taken and plan.vocab_size <= min(self._vocab_size, MAX_VOCAB_SIZE)

    def run(self, drafted: Mapping[int, Drafted]) -> dict[int, list[int]]:
        """Return the draft of each slot. Logits that are not finite end a draft, but not the sequence."""
        if not self._can_choose(drafted):
            return self._run_on_host(drafted)
        drafted = self._with_first_run(drafted)
        chunk = self._chunk(drafted)
        if chunk is None:
            return self._run_on_host(drafted)
        found = self._run_on_device(drafted, chunk)
        self._runner.before_wait()
        return found.read()

    def enqueue(self, drafted: Mapping[int, Drafted]) -> DraftsInFlight | None:
        """Enqueue the draft of each slot; None if :meth:`run` would choose its tokens on the host."""
        if not self._can_choose(drafted):
            return None
        drafted = self._with_first_run(drafted)
        chunk = self._chunk(drafted)
        return None if chunk is None else self._run_on_device(drafted, chunk)

    def _can_choose(self, drafted: Mapping[int, Drafted]) -> bool:
        """Tell whether the device can choose the tokens of these drafts."""
        return self.on_device and all(one.request.fits_positions for one in drafted.values())

    def _with_first_run(self, drafted: Mapping[int, Drafted]) -> Mapping[int, Drafted]:
        """Run the first tokens of long sequences, and return the rest."""
        if len(self._runner.chunks(self._batch.held, self._plan(drafted))) == 1:
            return drafted
        self._batch.run([one.tokens[:-1] for one in self._by_slot(drafted)])
        return {slot: one._replace(tokens=one.tokens[-1:]) for slot, one in drafted.items()}

    def _by_slot(self, drafted: Mapping[int, Drafted]) -> list[Drafted]:
        """Return the drafts of all active slots, without tokens for idle ones."""
        [*_, any_one] = drafted.values()
        return [drafted.get(slot, any_one._replace(tokens=())) for slot in range(len(self._batch))]

    def _plan(self, drafted: Mapping[int, Drafted]) -> StepPlan:
        return StepPlan.of([one.tokens for one in self._by_slot(drafted)])

    def _chunk(self, drafted: Mapping[int, Drafted]) -> Chunk | None:
        """Return one enqueue of the tokens, from slot 0 on; None if slots have no room for the rows that it pads."""
        lengths = self._batch.held
        [chunk, *more] = self._runner.chunks(lengths, self._plan(drafted))
        return None if more else from_first_slot(chunk, lengths, self._batch.max_sequence_length)

    def _run_on_host(self, drafted: Mapping[int, Drafted]) -> dict[int, list[int]]:
        drafts: dict[int, list[int]] = {slot: [] for slot in drafted}
        rows = {slot: one.tokens for slot, one in drafted.items()}
        while rows:
            logits = self._append([rows.get(slot, ()) for slot in range(len(self._batch))])
            following: dict[int, Sequence[int]] = {}
            for slot in rows:
                draft, one = drafts[slot], drafted[slot]
                token = self._guess(one.request, logits[slot], len(draft))
                if token is not None:
                    draft.append(token)
                    if len(draft) < one.limit:
                        following[slot] = (token,)
            rows = following
        return drafts

    def _guess(self, request: Request, logits: Logits, count: int) -> int | None:
        try:
            return request.guess(logits[: self._vocab_size], count)
        except EngineError:
            return None

    @nvtx_range("draft")
    def _run_on_device(self, drafted: Mapping[int, Drafted], chunk: Chunk) -> DraftsInFlight:
        runner, slots, stream = self._runner, self._runner.slots, self._runner.stream
        plan, count = self._plan(drafted), chunk.count
        others = [0] * (len(slots) - count)
        sampler = self.sampler = self.sampler or DraftSampler(
            runner.cache.memory,
            max_batch_size=runner.cache.max_batch_size,
            vocab_size=runner.plan.vocab_size,
            max_tokens=VERIFY_WIDTH - 1,
            stream=stream,
        )
        ids, logits = runner.device_views(count)
        if self._in_flight is not None and not self._in_flight.is_read:
            runner.synchronize()  # drafts that were not used may still read the buffers of the host
        with runner.work():
            runner.run(chunk, plan.rows[:count], every_logit=False)
            self._commit(plan.increments)
            sampler.begin([drafted[slot].request.positions((0,)) if slot in drafted else None for slot in range(count)], stream=stream)
            for step in range(max(one.limit for one in drafted.values())):
                if step:
                    takes = [int(slot in drafted and step < drafted[slot].limit) for slot in range(count)]
                    runner.enqueue_next(takes)
                    self._commit(1 if all(takes) and not others else [*takes, *others])
                sampler.sample(logits, ids, stream=stream)
            sampled = sampler.download(stream=stream)
            after, rows = list(slots), {}
            for slot, one in drafted.items():
                after[slot] = slots[slot].extended([*one.tokens, *[UNREAD] * (one.limit - 1)])
                rows[slot] = after[slot].row, slots[slot].length + len(one.tokens)
            self._apply(after)
        self._in_flight = DraftsInFlight({slot: one.limit for slot, one in drafted.items()}, sampler.table, sampled, rows)
        return self._in_flight

    def _append(self, rows: Rows) -> Logits:
        """Run new tokens of slots, and return the logits ``[A, vocab]``."""
        return self._batch.append(rows)

    def _commit(self, increments: int | Sequence[int]) -> None:
        """Count tokens of an enqueue."""
        self._runner.commit(increments)

    def _apply(self, slots: Sequence[Slot]) -> None:
        """Make slots current."""
        self._runner.apply(slots)

    def close(self) -> None:
        """Release the sampler. Idempotent."""
        if self.sampler is not None:
            self.sampler.close()


class InPlaceDraftSteps(DraftSteps):
    """Generates drafts of an assistant: all tokens run at one position, and a slot holds what it held before."""

    def _append(self, rows: Rows) -> Logits:
        return self._batch.verify(rows)[:, 0]

    def _commit(self, increments: int | Sequence[int]) -> None:
        pass

    def _apply(self, slots: Sequence[Slot]) -> None:
        pass
