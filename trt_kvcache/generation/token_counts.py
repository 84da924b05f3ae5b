"""``TokenCounts``: counts of generated tokens, as arrays that grow by one token at a time."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

#: Initial capacity in different tokens; doubled when it is full.
_FIRST_CAPACITY = 64


class TokenCounts:
    """Counts of tokens."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._places: dict[int, int] = {}
        self._ids = np.empty(_FIRST_CAPACITY, np.intp)
        self._counts = np.empty(_FIRST_CAPACITY, np.float32)
        for token in tokens:
            self.add(token)

    @property
    def ids(self) -> npt.NDArray[np.intp]:
        """The different tokens in order of first occurrence; a view that the next change may alter."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """Number of occurrences of each of :attr:`ids`; a view that the next change may alter."""
        return self._counts[: len(self._places)]

    def add(self, token: int) -> None:
        """Count one more token."""
        place = self._places.get(token)
        if place is not None:
            self._counts[place] += 1
            return
        place = len(self._places)
        if place == self._ids.size:
            self._ids, self._counts = _doubled(self._ids), _doubled(self._counts)
        self._ids[place], self._counts[place] = token, 1
        self._places[token] = place


def _doubled(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.concatenate((array, np.empty_like(array)))
