"""The loop of ``InferenceSession.generate``: choose a token for each slot, apply, hand it out, decode."""

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from trt_kvcache._util.nvtx_ranges import nvtx_range
from trt_kvcache.errors import ClosedError
from trt_kvcache.generation.request import Choice, GeneratedToken, Request
from trt_kvcache.session.batch import Batch
from trt_kvcache.session.decode_steps import DecodeSteps
from trt_kvcache.session.request_queue import RequestQueue
from trt_kvcache.session.runner import Runner
from trt_kvcache.session.slots import Slot
from trt_kvcache.session.step_plan import StepPlan


def generate_tokens(
    runner: Runner,
    batch: Batch,
    decode_steps: DecodeSteps,
    requests: Sequence[Request],
    prefill: Callable[[], np.ndarray[Any, Any]],
    *,
    check_open: Callable[[], None],
) -> Generator[GeneratedToken, None, None]:
    """Yield the tokens of requests that have one slot each, and keep it.

    A token becomes pending in its slot when it is yielded, so that the iterator may be left at any token.
    """
    check_open()
    logits = prefill()
    for slot, request in zip(runner.slots, requests, strict=True):
        request.set_context(slot.tokens)
        request.prepare()
    runner.note([slot._replace(sampler=request.sampler) for slot, request in zip(runner.slots, requests, strict=True)])
    with batch.finite():
        choices = _first_choices(batch, runner.slots, requests, logits)
    while True:
        for index, choice in choices.items():
            requests[index].take(choice)
        slots = [*runner.slots]
        in_force = runner.slots
        for index, choice in choices.items():
            _check_unchanged(runner, in_force, check_open)
            request, token = requests[index], choice.token
            assert token is not None  # no request of `generate` keeps its logits
            slots[index] = slots[index].chosen(token.token, request.sampler, request.generated)
            in_force = runner.note(slots)
            if token.finish_reason is not None:
                batch.remember(slots, [index])
            yield token
        if all(request.finished for request in requests):
            return
        _check_unchanged(runner, in_force, check_open)
        plan = StepPlan.of([() if request.finished else (request.last_token,) for request in requests])
        batch.check_decode(plan)
        with runner.work(continues=True), batch.finite():
            after, choices = decode_steps.run(runner.slots, requests, plan, ahead=True)
            runner.apply(after)


def generate_queued(
    runner: Runner, queue: RequestQueue, requests: Sequence[Request], *, check_open: Callable[[], None]
) -> Generator[GeneratedToken, None, None]:
    """Yield the tokens of more requests than there are slots."""
    check_open()
    handles = [queue.submit(request) for request in requests]
    seen = [0] * len(handles)
    while moved := queue.step():
        events: list[GeneratedToken] = []
        for handle in moved:
            new = handle.events[seen[handle.index] :]
            seen[handle.index] += len(new)
            events += new
        finished = all(handle.finished for handle in handles)
        if finished:
            queue.step()  # frees the slots, before the last tokens are handed out
        slots = runner.slots
        for event in events:
            _check_unchanged(runner, slots, check_open)
            yield event
        if finished:
            return
        _check_unchanged(runner, slots, check_open)


def _check_unchanged(runner: Runner, slots: tuple[Slot, ...], check_open: Callable[[], None]) -> None:
    check_open()
    if slots is not runner.slots:
        raise ClosedError("this iterator cannot continue: another call has changed the sequences since. Call generate again.")


@nvtx_range("sampling")
def _first_choices(batch: Batch, slots: Sequence[Slot], requests: Sequence[Request], logits: np.ndarray[Any, Any]) -> dict[int, Choice]:
    return {
        index: request.choose(logits[index], full=batch.is_full(slot))
        for index, (slot, request) in enumerate(zip(slots, requests, strict=True))
    }
