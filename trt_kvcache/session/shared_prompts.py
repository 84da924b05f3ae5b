"""``SharedPrompts``: runs the common prefix of concurrent prompts once, and copies it to the other slots."""

import logging
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from trt_kvcache.errors import CapacityError
from trt_kvcache.generation.token_ids import common_prefix
from trt_kvcache.session.batch import Batch
from trt_kvcache.session.queued_request import SharedPrompt
from trt_kvcache.session.runner import Runner
from trt_kvcache.session.step_outcome import StepOutcome

#: Fewer tokens than this are run again: copying them is not faster.
WORTH_SHARING = 32

_LOGGER = logging.getLogger("trt_kvcache.session")


class SharedPrompts:
    """Chooses prompts that wait for a prefix that another one runs, and copies it into their slots."""

    def __init__(self, runner: Runner, batch: Batch) -> None:
        self._runner = runner
        self._batch = batch

    def assign(self, outcome: StepOutcome, slot: int, others: Iterable[int]) -> None:
        """Have the prompt in a slot wait for the longest prefix that another slot has or will have, if that is worth it."""
        queued, held = outcome.running[slot], outcome.held
        row, adapter = np.asarray(queued.row), queued.request.adapter
        divergence = self._batch.divergence_point(row[:-1], adapter)
        outcome.progress[slot] = outcome.progress[slot]._replace(shared=None, divergence=divergence)
        best = held[slot] + WORTH_SHARING - 1  # shared tokens, of which there must be more
        if queued.is_scored or len(row) <= best or not self._reaches_every_slot:
            return
        for other in others:
            source, state = outcome.running[other], outcome.state(other)
            if source.request.adapter != adapter:
                continue
            if source is queued or outcome.progress[other].shared or source.is_scored or state not in ("prefilling", "decoding"):
                continue
            theirs = source.row if state == "prefilling" else source.row[: held[other]]
            if min(len(theirs), len(row)) <= best or theirs[best] != row[best]:
                continue
            length = common_prefix(row, theirs)
            if length == len(row) and (state == "decoding" or length < len(theirs)):
                length -= 1  # its last token is run for its logits
            if length > best and not (self._runner.has_states and held[other] > length):
                outcome.share(slot, SharedPrompt(source, length))
                best = length

    @property
    def _reaches_every_slot(self) -> bool:
        """True if an enqueue may start at each slot. If not, a prompt could become full before one that waits and then must run."""
        return all(map(self._runner.plan.can_start_at, range(self._runner.cache.max_batch_size)))

    def stop(self, outcome: StepOutcome, slot: int) -> int:
        """Return the length up to which a prompt runs now, so that waiting prompts and the prompt cache can take its states."""
        source, held = outcome.running[slot], outcome.slots[slot].length
        stops = [len(source.row)]
        if self._runner.has_states:
            divergence = outcome.progress[slot].divergence
            if divergence >= held + WORTH_SHARING:
                stops.append(divergence)
            shared = [one.shared for one in outcome.progress if one.shared and one.shared.source is source]
            stops += [one.length for one in shared if one.length > held]
        return min(stops)

    def take(self, outcome: StepOutcome) -> None:
        """Copy the prefixes that have been run by now into the slots that wait for them. Inside ``Runner.work``."""
        slots = {id(queued): slot for slot, queued in enumerate(outcome.running) if not queued.finished}
        for slot, shared in list(self._waiting(outcome)):
            if id(shared.source) not in slots:
                self.assign(outcome, slot, range(len(outcome.running)))
        ready: dict[int, list[tuple[int, int]]] = {}
        for slot, shared in self._waiting(outcome):
            source = slots[id(shared.source)]
            if shared.length <= outcome.slots[source].length:
                ready.setdefault(source, []).append((slot, shared.length))
        for source, wanted in ready.items():
            self._copy(outcome, source, wanted)

    def take_whole(self, outcome: StepOutcome, source: int) -> list[int]:
        """Copy a prompt that has just run whole into the slots of equal ones, and return these. Inside ``Runner.work``."""
        length = len(outcome.running[source].row)
        equal = [
            slot
            for slot, shared in self._waiting(outcome)
            if shared.source is outcome.running[source] and shared.length == length == len(outcome.running[slot].row)
        ]
        return equal if self._copy(outcome, source, [(slot, length) for slot in equal]) else []

    @staticmethod
    def _waiting(outcome: StepOutcome) -> Iterator[tuple[int, SharedPrompt]]:
        return ((slot, one.shared) for slot, one in enumerate(outcome.progress) if one.shared and outcome.state(slot) == "prefilling")

    def _copy(self, outcome: StepOutcome, source: int, wanted: Sequence[tuple[int, int]]) -> bool:
        """Copy tokens of a slot to others, and return whether there was room for it. They do not wait any more, either way."""
        if not wanted:
            return False
        for slot, _ in wanted:
            outcome.share(slot, None)
        try:
            outcome.slots = self._batch.copied(outcome.slots, source, dict(wanted))
        except CapacityError as error:
            _LOGGER.info("slot %d: what it holds is run again for %d other slots: %s", source, len(wanted), error)
            return False
        for slot, length in wanted:
            outcome.progress[slot] = outcome.progress[slot]._replace(reused=length)
            _LOGGER.info("request %d: %d of its tokens are copied from slot %d", outcome.running[slot].index, length, source)
        return True
