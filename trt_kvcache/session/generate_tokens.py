"""The loop behind ``InferenceSession.generate``: choose, hand out, decode."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from trt_kvcache.errors import ClosedError
from trt_kvcache.generation.request import GeneratedToken, Request
from trt_kvcache.session.batch import ActiveSequences


def generate_tokens(
    sequences: ActiveSequences, requests: Sequence[Request], prefill: Callable[[], np.ndarray[Any, Any]], *, check_open: Callable[[], None]
) -> Iterator[GeneratedToken]:
    """Yield the tokens of requests that have one slot each, in the order of the slots.

    ``sequences``: What has been handed out is cached or pending there, whenever the iterator is left.
    ``requests``: sequence of Request (A,).
    ``prefill``: callable. Called first: fills the slots and returns the logits of their last tokens, float32 ``[A, vocab]``.
    ``check_open``: callable. Raises once the session is closed.

    Raises ClosedError: another call has changed the sequences since the last token.
    """

    def check(changes: int) -> None:
        check_open()
        if changes != sequences.changes:
            raise ClosedError("this iterator is over: another call has changed the sequences since. Call generate again.")

    logits = prefill()
    sequences.samplers = [request.sampler for request in requests]
    while True:
        changes = sequences.changes
        going = [slot for slot, request in enumerate(requests) if not request.finished]
        for token in [requests[slot].choose(logits[slot], full=sequences.is_full(slot)) for slot in going]:
            check(changes)
            sequences.pending[token.index] = [token.token]
            sequences.samplers[token.index] = requests[token.index].sampler
            if token.finish_reason is not None:
                sequences.remember([token.index])
            yield token
        still = [not request.finished for request in requests]
        if not any(still):
            return
        check(changes)
        logits = sequences.decode([request.tokens[-1] for request in requests], None if all(still) else still)
