"""``StepOutcome``: the slots and requests after a step. It has no effect before it is applied."""

from __future__ import annotations

from collections.abc import Sequence

from trt_kvcache.generation.request import Choice
from trt_kvcache.session.queued_request import Progress, QueuedRequest, SharedPrompt
from trt_kvcache.session.request_handle import RequestState
from trt_kvcache.session.slots import Slot


class StepOutcome:
    """Slots, their requests with the progress of each, and the tokens that were chosen."""

    def __init__(self, running: Sequence[QueuedRequest], slots: Sequence[Slot]) -> None:
        self.running = [*running]
        self.slots = [*slots]
        self.progress = [queued.progress for queued in running]
        #: Choices of each slot, in order.
        self.choices: dict[int, Sequence[Choice]] = {}
        #: Slots whose request has run tokens or has a new one.
        self.advanced: set[int] = set()

    @property
    def held(self) -> list[int]:
        """Tokens that each slot holds."""
        return [slot.length for slot in self.slots]

    def state(self, slot: int) -> RequestState:
        """Return the state of a slot's request."""
        return "finished" if self.running[slot].finished else self.progress[slot].stage

    def admit(self, admitted: Sequence[QueuedRequest], slots: Sequence[Slot], now: float) -> None:
        """Add requests, whose prompts begin in the last of these slots."""
        for queued, slot in zip(admitted, slots[len(self.slots) :], strict=True):
            started = now if queued.progress.started is None else queued.progress.started
            self.progress.append(Progress("prefilling", started, slot.length))
        self.running += admitted
        self.slots = [*slots]

    def share(self, slot: int, shared: SharedPrompt | None) -> None:
        """Have a slot wait for a prefix of another one, or for none."""
        self.progress[slot] = self.progress[slot]._replace(shared=shared)

    def choose(self, slot: int, choices: Sequence[Choice]) -> None:
        """Take the next tokens of a slot's request, which are pending then; or, last of them, logits that it keeps."""
        self.choices[slot] = choices
        request = self.running[slot].request
        seed, counter = request.sampler
        for count, choice in enumerate(choices, start=1):
            if choice.token is not None:
                self.slots[slot] = self.slots[slot].chosen(choice.token.token, (seed, counter + count), request.generated + count)
                self.advanced.add(slot)

    @property
    def ended(self) -> list[int]:
        """Slots whose request ends with the last token that was chosen."""
        return [slot for slot, (*_, last) in self.choices.items() if last.token is not None and last.token.finish_reason is not None]
