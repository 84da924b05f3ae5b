"""``NgramDrafter``: prompt lookup. A draft continues an earlier occurrence of the last tokens in the sequence.

Rows in place of tokens, such as those of an image, match nothing, and a draft ends before them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import takewhile
from weakref import WeakKeyDictionary

from trt_kvcache.generation.drafter import DraftedSequence
from trt_kvcache.generation.request import Request

#: Tokens that must agree, and tokens that are compared to choose the best of several places.
_MIN_MATCH, _MAX_MATCH = 2, 8

#: Most places that are compared, the latest first.
_MAX_PLACES = 16


class NgramDrafter:
    """Looks up the last tokens of each sequence in its own earlier ones, prompt included. Needs no model: microseconds for a draft."""

    def __init__(self) -> None:
        self._indexes: WeakKeyDictionary[Request, _NgramIndex] = WeakKeyDictionary()

    def propose(self, sequences: Sequence[DraftedSequence]) -> list[list[int]]:
        """Propose the tokens after the longest match of each sequence; none without a match."""
        return [self._propose(one) for one in sequences]

    def _propose(self, sequence: DraftedSequence) -> list[int]:
        index = self._indexes.get(sequence.request)
        if index is None or len(index.tokens) > sequence.num_tokens:
            index = self._indexes[sequence.request] = _NgramIndex(sequence.vocab_size)
        index.extend(sequence.tokens_from(len(index.tokens)))
        return index.continuation(sequence.limit)


class _NgramIndex:
    """Tokens of one sequence, and for each the latest earlier one that follows the same two tokens: a token is indexed once."""

    def __init__(self, vocab_size: int | None) -> None:
        self._end = sys.maxsize if vocab_size is None else vocab_size  # ids from here on are rows
        self.tokens: list[int] = []
        # For each pair of tokens, the index after its latest occurrence. For each such index, the index after the previous one; 0: none.
        self._latest: dict[tuple[int, int], int] = {}
        self._earlier: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end."""
        self.tokens += tokens
        for place in range(len(self._earlier), len(self.tokens)):  # so the last two tokens are not in the index: nothing follows them
            earlier = 0
            if place >= _MIN_MATCH and max(key := self._key(place)) < self._end:
                earlier, self._latest[key] = self._latest.get(key, 0), place
            self._earlier.append(earlier)

    def continuation(self, count: int) -> list[int]:
        """Return up to ``count`` tokens that follow the place with the longest match; the latest one of equal ones."""
        tokens, end = self.tokens, len(self.tokens)
        best, longest = 0, 0
        place = self._latest.get(self._key(end), 0) if end >= _MIN_MATCH else 0
        for _ in range(_MAX_PLACES):
            if not place or longest == _MAX_MATCH:
                break
            length = self._match(place)
            if length > longest:
                best, longest = place, length
            place = self._earlier[place]
        if not best:
            return []
        # A match that overlaps the end repeats with the period of its distance.
        period = end - best
        return list(takewhile(self._end.__gt__, (tokens[best + offset % period] for offset in range(count))))

    def _key(self, place: int) -> tuple[int, int]:
        return self.tokens[place - 2], self.tokens[place - 1]

    def _match(self, place: int) -> int:
        """Return the number of equal tokens before a place and before the end."""
        pairs = zip(reversed(self.tokens[max(0, place - _MAX_MATCH) : place]), reversed(self.tokens[-_MAX_MATCH:]), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1] < self._end, pairs))
