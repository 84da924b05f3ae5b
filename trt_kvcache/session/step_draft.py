"""``StepDraft``: the slots and requests after a step. It has no effect before it is applied."""

from __future__ import annotations

from collections.abc import Sequence

from trt_kvcache.generation.request import Choice
from trt_kvcache.session.queued_request import Progress, QueuedRequest, SharedPrompt
from trt_kvcache.session.request_handle import RequestState
from trt_kvcache.session.slots import Slot


class StepDraft:
    """Slots, their requests with the progress of each, and the tokens that were chosen."""

    def __init__(self, running: Sequence[QueuedRequest], slots: Sequence[Slot]) -> None:
        self.running = [*running]
        self.slots = [*slots]
        self.progress = [queued.progress for queued in running]
        self.choices: dict[int, Choice] = {}
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

    def choose(self, slot: int, choice: Choice) -> None:
        """Take the next token of a slot's request, which is pending then; or logits that it keeps."""
        self.choices[slot] = choice
        if choice.token is not None:
            request = self.running[slot].request
            seed, counter = request.sampler
            self.slots[slot] = self.slots[slot].chosen(choice.token.token, (seed, counter + 1), request.generated + 1)
            self.advanced.add(slot)

    @property
    def ended(self) -> list[int]:
        """Slots whose request ends with the token that was chosen."""
        return [slot for slot, choice in self.choices.items() if choice.token is not None and choice.token.finish_reason is not None]
