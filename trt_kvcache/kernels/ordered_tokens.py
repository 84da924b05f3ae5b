"""Tokens in the order of their classes, then of their ids, of which only few are sorted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from trt_kvcache.kernels.scratch import scratch
from trt_kvcache.kernels.token_weights import Float32, class_weights, token_classes

Classes = np.ndarray[Any, np.dtype[np.int32]]
Places = np.ndarray[Any, np.dtype[np.intp]]

#: So few tokens are sorted at once.
FEW = 2048

#: Classes are counted if there are so many times more tokens; otherwise tokens are in at most so many bins, as a power of 2.
_TOKENS_PER_CLASS, _BIN_BITS = 2, 11


@dataclass(frozen=True)
class Found:
    """A token with which the sum of the weights exceeds a target."""

    group: int
    place: int
    sum: int
    in_last_class: bool


class CountedTokens:
    """Tokens of few classes: they are counted, and only the weights of classes are computed."""

    def __init__(self, classes: Classes) -> None:
        self._classes = classes
        counts = np.bincount(classes)
        present = np.flatnonzero(counts != 0)  # a few unlikely tokens may be many classes away
        self._present = present.astype(np.int32)
        self._weights = class_weights(self._present, out=np.empty(present.size, np.float32))
        self._sums = self._weights * counts[present]
        self._ends = np.cumsum(self._sums)
        #: The sum of all weights.
        self.total = int(self._ends[-1])

    def sum_of_at_least(self, weight: int) -> int:
        """Return the sum of the weights that are not less than one."""
        return _sum_of_at_least(weight, self._weights, self._sums)

    def find(self, target: int) -> Found | None:
        """Return the first token with which the sum of the weights exceeds a target; None if the sum of all does not."""
        if target >= self.total:
            return None
        chosen = int(np.searchsorted(self._ends, target, side="right"))
        before, weight = int(self._ends[chosen - 1]) if chosen else 0, int(self._weights[chosen])
        place = (target - before) // weight
        return Found(chosen, place, before + (place + 1) * weight, chosen + 1 == self._present.size)

    def token_of(self, found: Found) -> int:
        """Return the place of a token among all, from 0."""
        return int(np.flatnonzero(self._classes == self._present[found.group])[found.place])


class BinnedTokens:
    """Tokens of many classes: they are in bins of neighbouring classes, and only the bins that are asked for are sorted."""

    def __init__(self, classes: Classes, last: int) -> None:
        self._classes, self._last = classes, last
        bin_bits = _BIN_BITS if classes.size > FEW else 0  # a few are in one bin: they are sorted
        self._bins = scratch.array("bins", "int32", classes.size)
        np.right_shift(classes, max(last.bit_length() - bin_bits, 0), out=self._bins)
        self._weights = class_weights(classes, out=scratch.array("weights of all", "float32", classes.size))
        # In the types that bincount adds up: otherwise it makes arrays of them, which takes longer than adding up.
        bins, weights = (
            scratch.array(f"{what} to add up", dtype, classes.size) for what, dtype in (("bins", "intp"), ("weights", "float64"))
        )
        np.copyto(bins, self._bins)
        np.copyto(weights, self._weights)
        self._ends = np.cumsum(np.bincount(bins, weights))
        self._sorted: dict[int, tuple[Places, np.ndarray[Any, np.dtype[np.float64]]]] = {}
        #: The sum of all weights.
        self.total = int(self._ends[-1])

    def sum_of_at_least(self, weight: int) -> int:
        """Return the sum of the weights that are not less than one."""
        return _sum_of_at_least(weight, self._weights, self._weights)

    def find(self, target: int) -> Found | None:
        """Return the first token with which the sum of the weights exceeds a target; None if the sum of all does not."""
        if target >= self.total:
            return None
        chosen = int(np.searchsorted(self._ends, target, side="right"))
        members, sums = self._members(chosen)
        place = int(np.searchsorted(sums, target, side="right"))
        return Found(chosen, place, int(sums[place]), bool(self._classes[members[place]] == self._last))

    def token_of(self, found: Found) -> int:
        """Return the place of a token among all, from 0."""
        members, _ = self._members(found.group)
        return int(members[found.place])

    def _members(self, chosen: int) -> tuple[Places, np.ndarray[Any, np.dtype[np.float64]]]:
        """Return the tokens of a bin, in order, and the sums up to each."""
        if chosen not in self._sorted:
            members = np.flatnonzero(self._bins == chosen)
            members = members[np.argsort(self._classes[members], kind="stable")]
            before = self._ends[chosen - 1] if chosen else 0.0
            self._sorted[chosen] = members, before + np.cumsum(self._weights[members], dtype=np.float64)
        return self._sorted[chosen]


def _sum_of_at_least(weight: int, weights: Float32, sums: np.ndarray[Any, Any]) -> int:
    return int(np.sum(sums * (weights >= weight), dtype=np.float64))


def are_counted(last: float, size: int) -> bool:
    """Tell whether the classes of so many tokens are counted, if this is the largest."""
    return last < size / _TOKENS_PER_CLASS


def in_order(logits: Float32, largest: Any, scale: float) -> CountedTokens | BinnedTokens:
    """Return tokens in the order of their classes, then of their ids."""
    classes = token_classes(logits, largest, scale, out=scratch.array("classes of all", "int32", logits.size))
    last = int(classes.max())
    return CountedTokens(classes) if are_counted(last, logits.size) else BinnedTokens(classes, last)
