"""The loop of ``InferenceSession.generate``: choose a token for each slot, apply, yield it, decode."""

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from trt_kvcache._util.nvtx_ranges import nvtx_range
from trt_kvcache.errors import ClosedError
from trt_kvcache.generation.request import Choice, GeneratedToken, Request
from trt_kvcache.session.batch import Batch
from trt_kvcache.session.decode_steps import DecodeStep, DecodeSteps
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
        step = DecodeStep(runner.slots, _first_choices(batch, runner.slots, requests, logits))
    while True:
        in_force = runner.slots
        ended: list[int] = []
        num_turns = max(map(len, step.choices.values()), default=0)
        for turn in range(num_turns):
            is_last = turn == num_turns - 1
            if is_last and step.verified is not None and runner.uncommitted is step.verified:
                # Until now tokens of a draft were pending, since they could not be in the cache before they were yielded.
                _check_unchanged(runner, in_force, check_open)
                with runner.work(continues=True):
                    runner.apply(decode_steps.commit(step.verified, runner.slots))
                in_force = runner.slots
                batch.remember(in_force, ended)
            choices = {index: chosen[turn] for index, chosen in step.choices.items() if turn < len(chosen)}
            for index, choice in choices.items():
                requests[index].take(choice)
            slots = [*in_force]
            for index, choice in choices.items():
                _check_unchanged(runner, in_force, check_open)
                request, token = requests[index], choice.token
                assert token is not None  # no request of `generate` keeps its logits
                slots[index] = slots[index].chosen(token.token, request.sampler, request.generated)
                in_force = runner.note(slots)
                if token.finish_reason is not None:
                    if is_last:
                        batch.remember(slots, [index])
                    else:
                        ended.append(index)
                yield token
        if all(request.finished for request in requests):
            return
        _check_unchanged(runner, in_force, check_open)
        pairs = zip(runner.slots, requests, strict=True)
        plan = StepPlan.of([() if request.finished else slot.pending for slot, request in pairs])
        batch.check_decode(plan)
        with runner.work(continues=True), batch.finite():
            step = decode_steps.run(runner.slots, requests, plan, ahead=True)
            runner.apply(step.slots)


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
            queue.step()  # frees the slots, before the last tokens are yielded
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
def _first_choices(
    batch: Batch, slots: Sequence[Slot], requests: Sequence[Request], logits: np.ndarray[Any, Any]
) -> dict[int, list[Choice]]:
    return {
        index: [request.choose(logits[index], full=batch.is_full(slot))]
        for index, (slot, request) in enumerate(zip(slots, requests, strict=True))
    }
