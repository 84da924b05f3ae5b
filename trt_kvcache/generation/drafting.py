"""``Drafting``: the drafter of one request, how often its tokens are accepted, and the counts of proposed and accepted tokens."""

from __future__ import annotations

from trt_kvcache.generation.drafter import Drafter

#: Accepted and rejected tokens that a request begins with, so that its first drafts are neither long nor none.
_FIRST_ACCEPTED, _FIRST_REJECTED = 1.2, 0.8

#: Tokens after which about a third of what was counted is left: a text may become easier or harder to guess.
_MEMORY = 24

#: The rate of a text in which nothing is rejected any more.
_MAX_RATE = 0.999


class Drafting:
    """Drafter, acceptance and counters of one request."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        #: Tokens that were proposed and run, and tokens of these that were accepted.
        self.proposed = self.accepted = 0
        self._accepted, self._rejected = _FIRST_ACCEPTED, _FIRST_REJECTED

    @property
    def rate(self) -> float:
        """Chance that a token of a draft is accepted if those before it are."""
        return min(self._accepted / (self._accepted + self._rejected), _MAX_RATE)

    def expected_tokens(self, length: int) -> float:
        """Return how many tokens a step with a draft of this length gives on average."""
        rate = self.rate
        return (1 - rate ** (length + 1)) / (1 - rate)

    def record(self, proposed: int, accepted: int, *, depth: int | None = None) -> None:
        """Count a draft. ``depth``: tokens on its longest path, which are its length; all of them if left out."""
        self.proposed += proposed
        self.accepted += accepted
        rejected = int(accepted < (proposed if depth is None else depth))  # the tokens after a rejected one say nothing
        kept = (1 - 1 / _MEMORY) ** (accepted + rejected)
        self._accepted = self._accepted * kept + accepted
        self._rejected = self._rejected * kept + rejected
