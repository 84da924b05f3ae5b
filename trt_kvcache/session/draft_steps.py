"""``DraftSteps``: generates the drafts of a draft model or head for all slots, one token of each draft at a time.

On a GPU, tokens are chosen on the device and run there: the host enqueues all steps of the drafts, then waits once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trt_kvcache._util.nvtx_ranges import nvtx_range
from trt_kvcache.engine.decoder_profiles import VERIFY_WIDTH
from trt_kvcache.errors import EngineError
from trt_kvcache.generation.device_sampler import DeviceSampler
from trt_kvcache.generation.request import Request
from trt_kvcache.kernels.sampling_workspace import MAX_VOCAB_SIZE
from trt_kvcache.session.batch import Batch, Logits
from trt_kvcache.session.chunks import Chunk
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


class DraftSteps:
    """Runs tokens of slots and generates drafts after them. Then a slot holds these tokens and its draft, but for the last token."""

    def __init__(self, runner: Runner, batch: Batch, *, vocab_size: int) -> None:
        self._runner, self._batch, self._vocab_size = runner, batch, vocab_size
        self._sampler: DeviceSampler | None = None
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
        if not (self.on_device and all(one.request.fits_positions for one in drafted.values())):
            return self._run_on_host(drafted)
        if len(self._runner.chunks(self._batch.held, self._plan(drafted))) > 1:  # the first tokens of a long sequence
            self._batch.run([one.tokens[:-1] for one in self._by_slot(drafted)])
            drafted = {slot: one._replace(tokens=one.tokens[-1:]) for slot, one in drafted.items()}
        chunk = self._chunk(drafted)
        return self._run_on_host(drafted) if chunk is None else self._run_on_device(drafted, chunk)

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
        if more or max(lengths[: chunk.end]) + chunk.width > self._batch.max_sequence_length:
            return None
        return Chunk(0, (0,) * chunk.first + chunk.takes, chunk.width)

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
    def _run_on_device(self, drafted: Mapping[int, Drafted], chunk: Chunk) -> dict[int, list[int]]:
        runner, slots, stream = self._runner, self._runner.slots, self._runner.stream
        plan, count = self._plan(drafted), chunk.count
        others = [0] * (len(slots) - count)
        sampler = self._sampler = self._sampler or DeviceSampler(
            runner.cache.memory,
            max_batch_size=runner.cache.max_batch_size,
            vocab_size=runner.plan.vocab_size,
            pages=VERIFY_WIDTH,
            stream=stream,
        )
        ids, logits = runner.device_views(count)
        in_flight = []
        with runner.work():
            runner.run(chunk, plan.rows[:count], every_logit=False)
            self._commit(plan.increments)
            # After each choice, the sampler goes on to the next position by itself.
            sampler.set_positions(
                [drafted[slot].request.positions((0,)) if slot in drafted else None for slot in range(count)], 1, stream=stream
            )
            for step in range(max(one.limit for one in drafted.values())):
                if step:
                    takes = [int(slot in drafted and step < drafted[slot].limit) for slot in range(count)]
                    runner.enqueue_next(takes)
                    self._commit(1 if all(takes) and not others else [*takes, *others])
                sampler.sample(logits, ids, stream=stream)
                in_flight.append(sampler.download(count, stream=stream))
            runner.before_wait()
            found = [step.read() for step in in_flight]
            after, drafts = list(slots), {}
            for slot, one in drafted.items():
                chosen = [step[slot] for step in found[: one.limit]]
                after[slot] = slots[slot].extended([*one.tokens, *(max(token.token, 0) for token in chosen[:-1])])  # 0 after an error
                errors = [place for place, token in enumerate(chosen) if token.error is not None]
                drafts[slot] = [token.token for token in chosen[: errors[0] if errors else None]]
            self._apply(after)
        return drafts

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
        if self._sampler is not None:
            self._sampler.close()


class InPlaceDraftSteps(DraftSteps):
    """Generates drafts of an assistant: all tokens run at one position, and a slot holds what it held before."""

    def _append(self, rows: Rows) -> Logits:
        return self._batch.verify(rows)[:, 0]

    def _commit(self, increments: int | Sequence[int]) -> None:
        pass

    def _apply(self, slots: Sequence[Slot]) -> None:
        pass
