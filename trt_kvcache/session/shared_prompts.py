"""``SharedPrompts``: of prompts that begin alike and run at the same time, what is alike runs once."""

import logging
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from trt_kvcache.errors import CapacityError
from trt_kvcache.generation.token_ids import common_prefix
from trt_kvcache.session.batch import Batch
from trt_kvcache.session.queued_request import QueuedRequest, SharedPrompt
from trt_kvcache.session.step_executor import StepExecutor

#: Fewer tokens than this are run again: copying them is not faster.
WORTH_SHARING = 32

_LOGGER = logging.getLogger("trt_kvcache.session")


class SharedPrompts:
    """Chooses prompts that wait for what another one runs, and copies it into their slots."""

    def __init__(self, steps: StepExecutor, batch: Batch) -> None:
        self._steps = steps
        self._batch = batch

    def assign(self, slot: int, running: Sequence[QueuedRequest], others: Iterable[int]) -> None:
        """Decide whether the prompt in a slot waits for another one, and for which."""
        queued, held = running[slot], self._batch.held
        queued.shared = None
        row = np.asarray(queued.row)
        queued.parting = self._batch.parting(row[:-1])
        best = held[slot] + WORTH_SHARING - 1  # shared tokens, of which there must be more
        if queued.is_scored or len(row) <= best or not self._reaches_every_slot:
            return
        for other in others:
            source = running[other]
            if source is queued or source.shared or source.is_scored or source.state not in ("prefilling", "decoding"):
                continue
            theirs = source.row if source.state == "prefilling" else source.row[: held[other]]
            if len(theirs) <= best or theirs[best] != row[best]:
                continue
            length = common_prefix(row, theirs)
            if length == len(row) and (source.state == "decoding" or length < len(theirs)):
                length -= 1  # its last token is run for its logits
            if length > best and not (self._steps.has_states and held[other] > length):
                queued.shared, best = SharedPrompt(source, length), length

    @property
    def _reaches_every_slot(self) -> bool:
        """Whether an enqueue may start at each slot. If not, a prompt could become full in front of one that waits and then must run."""
        return all(map(self._steps.plan.can_start_at, range(self._steps.cache.max_batch_size)))

    def stop(self, source: QueuedRequest, running: Sequence[QueuedRequest], held: int) -> int:
        """Return the length up to which a prompt runs now, so that waiting prompts and the prefix cache can take its states."""
        stops = [len(source.row)]
        if self._steps.has_states:
            if source.parting >= held + WORTH_SHARING:
                stops.append(source.parting)
            stops += [one.shared.length for one in running if one.shared and one.shared.source is source and one.shared.length > held]
        return min(stops)

    def take(self, running: Sequence[QueuedRequest]) -> None:
        """Copy what has been run by now into the slots that wait for it. Inside a transaction."""
        slots = {id(queued): slot for slot, queued in enumerate(running) if not queued.finished}
        for slot, shared in list(self._waiting(running)):
            if id(shared.source) not in slots:
                self.assign(slot, running, range(len(running)))
        held = self._batch.held
        ready: dict[int, list[tuple[int, int]]] = {}
        for slot, shared in self._waiting(running):
            source = slots[id(shared.source)]
            if shared.length <= held[source]:
                ready.setdefault(source, []).append((slot, shared.length))
        for source, wanted in ready.items():
            self._copy(source, wanted, running)

    def take_whole(self, source: int, running: Sequence[QueuedRequest]) -> list[int]:
        """Copy a prompt that has just run whole into the slots of those that are equal. Inside a transaction."""
        length = len(running[source].row)
        equal = [
            slot
            for slot, shared in self._waiting(running)
            if shared.source is running[source] and shared.length == length == len(running[slot].row)
        ]
        return equal if self._copy(source, [(slot, length) for slot in equal], running) else []

    @staticmethod
    def _waiting(running: Sequence[QueuedRequest]) -> Iterator[tuple[int, SharedPrompt]]:
        return ((slot, one.shared) for slot, one in enumerate(running) if one.state == "prefilling" and one.shared)

    def _copy(self, source: int, wanted: Sequence[tuple[int, int]], running: Sequence[QueuedRequest]) -> bool:
        """Copy tokens of a slot to others, and return whether there was room for it. They do not wait any more, either way."""
        if not wanted:
            return False
        for slot, _ in wanted:
            running[slot].shared = None
        try:
            self._batch.copy_tokens(source, dict(wanted))
        except CapacityError as error:
            _LOGGER.info("slot %d: what it holds is run again for %d other slots: %s", source, len(wanted), error)
            return False
        for slot, length in wanted:
            running[slot].reused = length
            _LOGGER.info("request %d: %d of its tokens are copied from slot %d", running[slot].index, length, source)
        return True
