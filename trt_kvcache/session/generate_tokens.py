"""The loop behind ``InferenceSession.generate``: choose a token for each slot, hand it out, decode."""

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from trt_kvcache._util.nvtx_ranges import nvtx_range
from trt_kvcache.errors import ClosedError
from trt_kvcache.generation.request import GeneratedToken, Request
from trt_kvcache.session.batch import Batch
from trt_kvcache.session.request_queue import RequestQueue
from trt_kvcache.session.token_steps import TokenSteps


def generate_tokens(
    batch: Batch,
    token_steps: TokenSteps,
    requests: Sequence[Request],
    prefill: Callable[[], np.ndarray[Any, Any]],
    *,
    check_open: Callable[[], None],
) -> Generator[GeneratedToken, None, None]:
    """Yield the tokens of requests that have one slot each."""
    check_open()
    logits = prefill()
    for slot, request in enumerate(requests):
        request.set_context(batch[slot].tokens)
        request.prepare()
        batch.assign_sampler(slot, request.sampler)
    chosen = _first_tokens(batch, requests, logits)
    while True:
        changes = batch.changes
        for token in chosen:
            _check_unchanged(batch, changes, check_open)
            request = requests[token.index]
            batch.record_token(token.index, token.token, request.sampler, generated=request.generated)
            if token.finish_reason is not None:
                batch.remember([token.index])
            yield token
        going = [not request.finished for request in requests]
        if not any(going):
            return
        _check_unchanged(batch, changes, check_open)
        chosen = token_steps.step(requests, going, ahead=True)


def generate_queued(
    batch: Batch, queue: RequestQueue, requests: Sequence[Request], *, check_open: Callable[[], None]
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
        changes = batch.changes
        for event in events:
            _check_unchanged(batch, changes, check_open)
            yield event
        if finished:
            return
        _check_unchanged(batch, changes, check_open)


def _check_unchanged(batch: Batch, changes: int, check_open: Callable[[], None]) -> None:
    check_open()
    if changes != batch.changes:
        raise ClosedError("this iterator cannot continue: another call has changed the sequences since. Call generate again.")


@nvtx_range("sampling")
def _first_tokens(batch: Batch, requests: Sequence[Request], logits: np.ndarray[Any, Any]) -> list[GeneratedToken]:
    choices = [request.choose(logits[slot], full=batch.is_full(slot)) for slot, request in enumerate(requests)]
    return [token for request, choice in zip(requests, choices, strict=True) if (token := request.take(choice)) is not None]
