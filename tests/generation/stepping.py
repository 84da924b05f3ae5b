"""One token after another of a request, as a session takes them."""

import numpy as np

from trt_kvcache.generation.request import GeneratedToken, Request


def next_token(request: Request, logits: np.ndarray, *, full: bool = False) -> GeneratedToken:
    """Let a request choose its next token, and take it."""
    event = request.take(request.choose(logits, full=full))
    assert event is not None
    return event
