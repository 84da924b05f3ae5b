"""``Cursor``: a request with the number of its tokens. A step ahead is valid for the cursors that it assumed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from trt_kvcache.generation.request import Request
from trt_kvcache.session.step_plan import StepPlan


class Cursor(NamedTuple):
    """A request, and the number of its tokens so far."""

    request: Request
    num_tokens: int

    def following(self, count: int = 1) -> Cursor:
        """Return the cursor after more tokens."""
        return Cursor(self.request, self.num_tokens + count)


#: The cursor of each slot; None for an idle slot.
Cursors = Sequence[Cursor | None]


def cursors_of(requests: Sequence[Request], plan: StepPlan) -> Cursors:
    """Return the cursors of the slots of a plan."""
    return [Cursor(request, request.num_tokens) if row else None for request, row in zip(requests, plan.rows, strict=True)]


def still_holds(now: Cursors, then: Cursors) -> bool:
    """Tell whether a step ahead has run the tokens of these requests. Requests that have ended since do not matter."""
    return all(one is None or one == other for one, other in zip_longest(now, then))
