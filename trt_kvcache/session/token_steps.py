"""``TokenSteps``: decode steps that end with chosen tokens: on the host, or on the device and one step ahead."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple, cast

from trt_kvcache._util.nvtx_ranges import nvtx_range
from trt_kvcache.errors import KVCacheError
from trt_kvcache.generation.device_sampler import DeviceSampler, SampledTokens
from trt_kvcache.generation.request import GeneratedToken, Request
from trt_kvcache.kernels.sampling_workspace import MAX_VOCAB_SIZE
from trt_kvcache.session.batch import Batch, Logits
from trt_kvcache.session.slot_state import SlotState
from trt_kvcache.session.step_executor import StepExecutor


class _Place(NamedTuple):
    """Where a request is: it, and how many tokens it has."""

    request: Request
    num_tokens: int


#: Where the request of each slot is; None for an idle slot.
_Places = list[_Place | None]


@dataclass(frozen=True)
class _EnqueuedStep:
    """A step that was enqueued and is not committed, and all that it depends on."""

    places: _Places
    slots: list[SlotState]
    held: list[int]
    enqueues: int
    sampled: SampledTokens | KVCacheError


class _Known(NamedTuple):
    """What is on the device."""

    places: Mapping[int, _Place | None]
    step: _EnqueuedStep | None


_NOTHING = _Known({}, None)


class TokenSteps:
    """Runs the last token of requests, and chooses their next ones."""

    def __init__(self, steps: StepExecutor, batch: Batch) -> None:
        self._steps = steps
        self._batch = batch
        self._sampler: DeviceSampler | None = None
        self._known = _NOTHING
        #: Whether tokens are chosen on the device. Host memory can be treated like a device, which is of use to tests only.
        self.on_device = not steps.cache.memory.is_host and self.can_be_on_device

    @property
    def can_be_on_device(self) -> bool:
        """Whether the engine has ids and logits that a :class:`DeviceSampler` takes."""
        plan = self._steps.plan
        return (plan.input_ids.dtype, plan.logits.dtype) == ("int32", "float32") and plan.vocab_size <= MAX_VOCAB_SIZE

    def step(self, requests: Sequence[Request], going: Sequence[bool], *, ahead: bool) -> list[GeneratedToken]:
        """Run the last token of requests in one enqueue, and choose the next one of each."""
        return cast("list[GeneratedToken]", self._step(requests, going, ahead=ahead, waits=True))

    def step_without_waiting(self, requests: Sequence[Request], going: Sequence[bool], *, ahead: bool) -> list[GeneratedToken | None]:
        """Run a step as :meth:`step` does; a request whose logits processors are not ready gets None, and keeps its logits to resume."""
        return self._step(requests, going, ahead=ahead, waits=False)

    def _step(self, requests: Sequence[Request], going: Sequence[bool], *, ahead: bool, waits: bool) -> list[GeneratedToken | None]:
        tokens = [request.last_token if goes else 0 for request, goes in zip(requests, going, strict=True)]
        taking_part = None if all(going) else going
        if self.on_device and all(request.fits_device for request in compress(requests, going)):
            return [*self._step_on_device(requests, tokens, taking_part, ahead=ahead)]
        with self._batch.decode_transaction(tokens, taking_part):
            logits = self._batch.decode(tokens, taking_part)
            return self._choose(requests, going, logits, waits=waits)

    @nvtx_range("sampling")
    def _choose(self, requests: Sequence[Request], going: Sequence[bool], logits: Logits, *, waits: bool) -> list[GeneratedToken | None]:
        choose = Request.choose if waits else Request.choose_or_keep
        slots = [*compress(range(len(requests)), going)]
        choices = [choose(requests[slot], logits[slot], full=self._batch.is_full(slot)) for slot in slots]
        return [requests[slot].take(choice) for slot, choice in zip(slots, choices, strict=True)]

    @nvtx_range("decode")
    def _step_on_device(
        self, requests: Sequence[Request], tokens: list[int], going: Sequence[bool] | None, *, ahead: bool
    ) -> list[GeneratedToken]:
        started = time.perf_counter()
        batch = self._batch
        known, self._known = self._known, _NOTHING  # if this is interrupted, nothing is known
        places = _places(requests, going)
        with batch.decode_transaction(tokens, going):
            step = known.step
            if step is None or not self._continues(step, places):
                batch.enqueue(tokens, going)
                step, held = self._sample(places, known.places if known.step is None else {})
            else:
                held = known.places
            if isinstance(step.sampled, KVCacheError):
                raise step.sampled
            batch.commit(tokens, going)
            following = None
            if ahead and self._can_follow(places):
                following, held = self._follow(places, held)
            sampled = step.sampled.read()
            batch.count_step(going, started)
            received = [
                (place.request, place.request.receive(sampled[slot], full=batch.is_full(slot)))
                for slot, place in enumerate(places)
                if place is not None
            ]
            chosen = [token for request, choice in received if (token := request.take(choice)) is not None]
        self._known = _Known(held, following)
        return chosen

    def _continues(self, step: _EnqueuedStep, places: _Places) -> bool:
        """Tell whether a step has run what is to be run now. What it has run of requests that have ended since does not matter."""
        batch = self._batch
        return (
            step.enqueues == self._steps.enqueues
            and step.held == batch.held
            and step.slots == batch.slots
            and all(now is None or now == then for now, then in zip(places, step.places, strict=True))
        )

    def _can_follow(self, places: _Places) -> bool:
        """Tell whether a next step is sure to have room, and likely to have a request that needs it."""
        rooms = [not self._batch.is_full(slot) for slot, place in enumerate(places) if place is not None]
        return all(rooms) and any(place.request.remaining > 1 for place in places if place is not None)

    def _follow(self, places: _Places, held: Mapping[int, _Place | None]) -> tuple[_EnqueuedStep, Mapping[int, _Place | None]]:
        """Enqueue the step after one whose tokens are only on the device. If that fails, it is said when the turn of the step comes."""
        after = [None if place is None else _Place(place.request, place.num_tokens + 1) for place in places]
        try:
            self._steps.enqueue_next(len(after))
            return self._sample(after, held)
        except KVCacheError as error:
            return self._enqueued(after, error), {}

    @nvtx_range("sampling")
    def _sample(self, places: _Places, held: Mapping[int, _Place | None]) -> tuple[_EnqueuedStep, Mapping[int, _Place | None]]:
        """Choose the tokens after an enqueue, into the ids of the next one, and send them to the host. Does not wait."""
        stream = self._steps.stream
        if self._sampler is None:
            cache = self._steps.cache
            self._sampler = DeviceSampler(
                cache.memory, max_batch_size=cache.max_batch_size, vocab_size=self._steps.plan.vocab_size, stream=stream
            )
        for slot, place in enumerate(places):
            if slot not in held or held[slot] != place:
                if place is None:
                    self._sampler.clear_slot(slot, stream=stream)
                else:
                    place.request.enter(self._sampler, slot, stream=stream)
        tokens, logits = self._steps.device_views(len(places))
        self._sampler.sample(logits, tokens, stream=stream)
        after = {slot: None if place is None else _Place(place.request, place.num_tokens + 1) for slot, place in enumerate(places)}
        return self._enqueued(places, self._sampler.download(len(places), stream=stream)), after

    def _enqueued(self, places: _Places, sampled: SampledTokens | KVCacheError) -> _EnqueuedStep:
        return _EnqueuedStep(places, self._batch.slots, self._batch.held, self._steps.enqueues, sampled)

    def close(self) -> None:
        """Release what is on the device. Idempotent."""
        self._known = _NOTHING
        if self._sampler is not None:
            self._sampler.close()


def _places(requests: Sequence[Request], going: Sequence[bool] | None) -> _Places:
    return [_Place(request, request.num_tokens) if going is None or going[slot] else None for slot, request in enumerate(requests)]
