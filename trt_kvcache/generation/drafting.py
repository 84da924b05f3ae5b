"""``Drafting``: the drafter of one request, how often its tokens are accepted, and the counts of proposed and accepted tokens."""

from __future__ import annotations

from trt_kvcache.generation.drafter import Drafter

#: Accepted tokens and misses that a request begins with, so that its first drafts are neither long nor none.
_FIRST_HITS, _FIRST_MISSES = 1.2, 0.8

#: Tokens after which about a third of what was counted is left: a text may become easier or harder to guess.
_MEMORY = 24

#: The rate of a text in which nothing is missed any more.
_MOST = 0.999

#: A draft ends before a token that would be accepted less often than this.
_LEAST_CHANCE = 0.05


class Drafting:
    """Drafter, acceptance and counters of one request. The length of a draft changes no token, only the time that they take."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        #: Tokens that were proposed and run, and tokens of these that were accepted.
        self.proposed = self.accepted = 0
        self._hits, self._misses = _FIRST_HITS, _FIRST_MISSES

    @property
    def rate(self) -> float:
        """How often a token of a draft is accepted if those before it are."""
        return min(self._hits / (self._hits + self._misses), _MOST)

    def expected_tokens(self, length: int) -> float:
        """Return how many tokens a step with a draft of this length gives on average."""
        rate = self.rate
        return (1 - rate ** (length + 1)) / (1 - rate)

    def length(self, longest: int) -> int:
        """Return the most tokens of the next draft, in a step whose drafts have at most ``longest``: at least 1 of these."""
        length = min(1, longest)
        while length < longest and self.rate ** (length + 1) >= _LEAST_CHANCE:
            length += 1
        return length

    def record(self, proposed: int, accepted: int, *, depth: int | None = None) -> None:
        """Count a draft. ``depth``: tokens on its longest path, which are its length; all of them if left out."""
        self.proposed += proposed
        self.accepted += accepted
        misses = int(accepted < (proposed if depth is None else depth))
        kept = (1 - 1 / _MEMORY) ** (accepted + misses)
        self._hits = self._hits * kept + accepted
        self._misses = self._misses * kept + misses
