"""The loop behind ``InferenceSession.generate``: choose a token for each slot, hand it out, decode."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from trt_kvcache.errors import ClosedError
from trt_kvcache.generation.request import GeneratedToken, Request
from trt_kvcache.session.batch import Batch


def generate_tokens(
    batch: Batch, requests: Sequence[Request], prefill: Callable[[], np.ndarray[Any, Any]], *, check_open: Callable[[], None]
) -> Iterator[GeneratedToken]:
    """Yield the tokens of requests that have one slot each.

    Parameters
    ----------
    batch : Batch
        A token that was handed out is in the cache or pending there, whenever the iterator is left.
    requests : sequence of Request (A,)
        In the order of the slots.
    prefill : callable
        Called first. Fills the slots and returns the logits at their last tokens, float32 ``[A, vocab]`` on the host.
    check_open : callable
        Raises if the session is closed.

    Yields
    ------
    GeneratedToken
        In the order of the slots, one for each request that has not ended, then the next ones.

    Raises
    ------
    ClosedError
        The session is closed, or another call has changed the batch since the last token.
    """

    def check_unchanged(changes: int) -> None:
        check_open()
        if changes != batch.changes:
            raise ClosedError("this iterator cannot continue: another call has changed the sequences since. Call generate again.")

    check_open()
    logits = prefill()
    for slot, request in enumerate(requests):
        batch.assign_sampler(slot, request.sampler)
    while True:
        changes = batch.changes
        going = [slot for slot, request in enumerate(requests) if not request.finished]
        for token in [requests[slot].choose(logits[slot], full=batch.is_full(slot)) for slot in going]:
            check_unchanged(changes)
            batch.record_token(token.index, token.token, requests[token.index].sampler)
            if token.finish_reason is not None:
                batch.remember([token.index])
            yield token
        still = [not request.finished for request in requests]
        if not any(still):
            return
        check_unchanged(changes)
        logits = batch.decode([request.tokens[-1] for request in requests], None if all(still) else still)
