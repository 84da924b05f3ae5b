"""``Late``: a logits processor that is not ready at once."""

from __future__ import annotations

from trt_kvcache.errors import ProcessorError
from trt_kvcache.generation.sampling import DeferredProcessor


class Late(DeferredProcessor):
    """Changes nothing, and is ready when it has been asked ``delay(n)`` more times behind n tokens; fails behind ``fails`` tokens."""

    def __init__(self, delay=lambda count: 2, fails=None):
        self.delay, self.fails = delay, fails
        self.asked: dict[int, int] = {}
        self.called: list[int] = []

    def ready(self, tokens, seconds=0.0):
        count = len(tokens)
        self.asked[count] = self.asked.get(count, 0) + 1
        return self.asked[count] > self.delay(count)

    def __call__(self, tokens, logits):
        self.called.append(len(tokens))
        if len(tokens) == self.fails:
            raise ProcessorError("late: failed")
        return logits
