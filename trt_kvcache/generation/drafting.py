"""``Drafting``: the drafter of one request, the length of its drafts, and the counts of proposed and accepted tokens."""

from __future__ import annotations

from trt_kvcache.generation.drafter import Drafter

#: Tokens of the first draft, and of the longest. A draft runs after one token, so these fill enqueues of 4 and 16.
_FIRST_LENGTH, _MAX_LENGTH = 3, 15

#: Tokens without drafts after drafts did not pay: the first time, and at most.
_FIRST_PAUSE, _MAX_PAUSE = 8, 128


class Drafting:
    """Drafter, length of drafts and counters of one request. The length changes no token, only the time that they take."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        #: Tokens that were proposed and run, and tokens of these that were accepted.
        self.proposed = self.accepted = 0
        self._length = _FIRST_LENGTH
        self._pause = _FIRST_PAUSE
        self._resumes_at = 0

    def length(self, num_tokens: int) -> int:
        """Return the most tokens of the next draft, after ``num_tokens`` generated tokens; 0 during a pause."""
        return self._length if num_tokens >= self._resumes_at else 0

    def record(self, proposed: int, accepted: int, num_tokens: int, *, depth: int | None = None) -> None:
        """Count a draft. Hits double its length, misses halve it; after misses of single tokens drafts pause, longer each time.

        ``depth``: tokens on its longest path, which are its length; all of them if left out.
        """
        self.proposed += proposed
        self.accepted += accepted
        length = proposed if depth is None else depth
        if accepted:
            self._pause = _FIRST_PAUSE
        if accepted == length == self._length:
            self._length = min(2 * self._length + 1, _MAX_LENGTH)
        elif 2 * accepted < length:
            self._length //= 2
        if not self._length:
            self._length, self._resumes_at = 1, num_tokens + self._pause
            self._pause = min(2 * self._pause, _MAX_PAUSE)
