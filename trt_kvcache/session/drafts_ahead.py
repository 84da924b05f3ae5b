"""``DraftsAhead``: generates the next drafts of slots while only the device knows which tokens of the last ones were accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trt_kvcache._util.nvtx_ranges import nvtx_range
from trt_kvcache.generation.draft_sampler import DraftSampler
from trt_kvcache.kernels.draft_kernels import DraftedSlots, DrafterRows, feed_drafter_kernel
from trt_kvcache.kernels.length_kernels import increment_scalar_kernel, increment_tensor_kernel
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.session.batch import Batch
from trt_kvcache.session.draft_steps import DraftsInFlight
from trt_kvcache.session.runner import Runner
from trt_kvcache.session.step_plan import StepPlan

#: Staging pages: of a step, of a step ahead that is dropped, and of the step in its place.
_PAGES = 3


class Continued(NamedTuple):
    """A slot of the drafter whose draft is being verified, and gets a next one."""

    #: Slot of the large model, and tokens that it holds before the draft.
    target: int
    length: int
    #: Tokens of the sequence that the slot of the drafter holds.
    known: int
    #: Most tokens that the verification chooses.
    chosen: int
    #: Tokens of the next draft.
    limit: int


@dataclass(frozen=True)
class AheadPlan:
    """Enqueue of the chosen tokens, and the drafts after them."""

    #: By slot of the drafter.
    continued: Mapping[int, Continued]
    #: Tokens that each slot of the drafter keeps.
    held: Sequence[int]
    #: Slots and tokens of the enqueue.
    count: int
    width: int


class ChosenTokens(NamedTuple):
    """Tokens that a verification has chosen, on the device."""

    slots: DraftedSlots
    #: ``ROW_RESULT`` of the rows of a verification of this width.
    results: DeviceTensor
    width: int
    #: Hidden states of the same rows, for a head.
    hidden: DeviceTensor | None


class DraftsAhead:
    """Runs drafts past the lengths of the drafter's cache. :meth:`settle` counts the chosen tokens once the host has read them."""

    # The chosen tokens run again even if the slot has the first of them from the last draft: so one shape fits any number of accepted ones,
    # and a head reads the hidden states of the model.

    def __init__(self, runner: Runner, batch: Batch) -> None:
        self._runner, self._batch, self._memory = runner, batch, runner.cache.memory
        self._slots = runner.cache.max_batch_size
        # Targets, offsets, and the tokens to take.
        shape = (3 * self._slots,)
        self._allocation = self._memory.allocate(dense_nbytes(shape, "int32"), zeroed=True, stream=runner.stream)
        self._numbers = DeviceTensor(self._allocation, shape=shape, dtype="int32")
        self._pages = [self._memory.staging((2 * self._slots,), "int32") for _ in range(_PAGES)]
        self._uploaded: list[int] = []

    def plan(self, continued: Mapping[int, Continued]) -> AheadPlan | None:
        """Plan the next drafts by slot; None if a slot may lack room."""
        runner = self._runner
        if runner.plan.last_token_ids.dtype != "int32" or any(one.known > self._batch[slot].length for slot, one in continued.items()):
            return None
        held = [continued[slot].known if slot in continued else length for slot, length in enumerate(self._batch.held)]
        end, rows = 1 + max(continued), [[0] * continued[slot].chosen if slot in continued else [] for slot in range(len(held))]
        room = self._batch.max_sequence_length - max(held[:end]) - max(one.limit for one in continued.values())
        if room < max(map(len, rows)):
            return None
        [chunk, *more] = runner.chunks(held, StepPlan.of(rows))
        return None if more or chunk.width > room else AheadPlan(continued, held, chunk.end, chunk.width)

    @nvtx_range("draft")
    def run(self, plan: AheadPlan, chosen: ChosenTokens, sampler: DraftSampler) -> DraftsInFlight:
        """Enqueue the next drafts. Their sampler goes on with the requests that it has. Does not wait."""
        runner, stream, count = self._runner, self._runner.stream, plan.count
        self._batch.shorten(plan.held)  # the rows after them are overwritten
        self._upload(plan, stream)
        starts, last = runner.starts(count), runner.last_from_device(count)
        targets, offsets, takes = (self._numbers[first : first + count] for first in range(0, len(self._numbers), self._slots))
        ids, (next_ids, logits) = runner.input_ids(count * plan.width), runner.device_views(count)
        lengths = runner.cache.kv_cache_lengths[:count]
        rows = DrafterRows(targets, offsets, lengths, ids, starts, takes, last, sampler.params[:count])
        feed_drafter_kernel(chosen.slots, chosen.results, chosen.width, rows, plan.width, stream)
        inputs = runner.hidden_inputs
        if inputs is not None:
            assert chosen.hidden is not None
            moves = [(slot * plan.width, one.target * chosen.width, one.chosen) for slot, one in plan.continued.items()]
            inputs.load_rows(chosen.hidden, moves, stream=stream)
        runner.run_ahead(count, plan.width, every_logit=False)
        if inputs is not None:
            inputs.keep_at(last, plan.width, stream=stream)
        increment_tensor_kernel(starts, takes, stream)
        sampler.continue_on_device()
        sampler.sample(logits, next_ids, stream=stream)
        for step in range(1, max(one.limit for one in plan.continued.values())):
            if step > 1:
                increment_scalar_kernel(starts, 1, stream)
            if inputs is not None:
                inputs.load_own(count, stream=stream)
            runner.run_next_ahead(count)
            if inputs is not None:
                inputs.keep_own(count, stream=stream)
            sampler.sample(logits, next_ids, stream=stream)
        limits = {slot: one.limit for slot, one in plan.continued.items()}
        return DraftsInFlight(limits, sampler.table, sampler.download(stream=stream), {})

    def _upload(self, plan: AheadPlan, stream: Any) -> None:
        targets, offsets = [-1] * self._slots, [0] * self._slots
        for slot, one in plan.continued.items():
            targets[slot], offsets[slot] = one.target, one.known - one.length
        numbers = [*targets, *offsets]
        if numbers != self._uploaded:
            self._uploaded = []
            self._pages = [*self._pages[1:], self._pages[0]]
            self._pages[-1][...] = numbers
            self._memory.upload(self._numbers[: len(numbers)], self._pages[-1], stream=stream)
            self._uploaded = numbers

    def settle(self, chosen: Mapping[int, Sequence[int]]) -> None:
        """Count the chosen tokens of slots, which have run, as tokens of these slots."""
        runner = self._runner
        rows = [chosen.get(slot, ()) for slot in range(len(self._batch))]
        with runner.work():
            runner.commit([len(row) for row in rows])
            runner.apply([slot.extended(row) if row else slot for slot, row in zip(runner.slots, rows, strict=True)])

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self._allocation.close()
