"""Tokens in the order of their classes, then of their ids; only few of them are sorted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from trt_kvcache.kernels.scratch import scratch
from trt_kvcache.kernels.token_weights import Float32, class_weights, token_classes

Classes = np.ndarray[Any, np.dtype[np.int32]]
Places = np.ndarray[Any, np.dtype[np.intp]]

#: Up to this number, tokens are sorted together.
FEW = 2048

#: Classes are counted if there are at least this many tokens a class; otherwise tokens are put into at most ``2**_BIN_BITS`` bins.
_TOKENS_PER_CLASS, _BIN_BITS = 2, 11


@dataclass(frozen=True)
class Found:
    """The first token for which the sum of the weights up to it exceeds a target."""

    group: int  # its class, or its bin of classes
    place: int  # tokens of the group before it
    sum: int  # of the weights up to it
    in_last_class: bool  # no token has a smaller weight


class CountedTokens:
    """Tokens of few classes: the classes are counted, and only their weights are computed. ``classes`` must not change meanwhile."""

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
        """Return the sum of the weights that are at least ``weight``."""
        return _sum_of_at_least(weight, self._weights, self._sums)

    def find(self, target: int) -> Found | None:
        """Return the first token for which the sum of the weights up to it exceeds a target; None if the sum of all does not."""
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
    """Tokens of many classes: in bins of adjacent classes, each of which is sorted when needed. ``classes`` must not change meanwhile."""

    def __init__(self, classes: Classes, last: int) -> None:
        self._classes, self._last = classes, last
        bin_bits = _BIN_BITS if classes.size > FEW else 0  # a few are in one bin: they are sorted
        self._bins = scratch.array("bins", "int32", classes.size)
        np.right_shift(classes, max(last.bit_length() - bin_bits, 0), out=self._bins)
        self._weights = class_weights(classes, out=scratch.array("weights of all", "float32", classes.size))
        # Of the dtypes in which bincount sums: otherwise it converts the arrays, which takes longer than the sum.
        bins, weights = (scratch.array(f"{what} to sum", dtype, classes.size) for what, dtype in (("bins", "intp"), ("weights", "float64")))
        np.copyto(bins, self._bins)
        np.copyto(weights, self._weights)
        self._ends = np.cumsum(np.bincount(bins, weights))
        self._sorted: dict[int, tuple[Places, np.ndarray[Any, np.dtype[np.float64]]]] = {}
        #: The sum of all weights.
        self.total = int(self._ends[-1])

    def sum_of_at_least(self, weight: int) -> int:
        """Return the sum of the weights that are at least ``weight``."""
        return _sum_of_at_least(weight, self._weights, self._weights)

    def find(self, target: int) -> Found | None:
        """Return the first token for which the sum of the weights up to it exceeds a target; None if the sum of all does not."""
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
    """Return True if the classes of ``size`` tokens are counted, given the largest class."""
    return last < size / _TOKENS_PER_CLASS


def in_order(logits: Float32, largest: Any, scale: float) -> CountedTokens | BinnedTokens:
    """Return tokens in the order of their classes, then of their ids. The result is valid until the next call of this thread."""
    classes = token_classes(logits, largest, scale, out=scratch.array("classes of all", "int32", logits.size))
    last = int(classes.max())
    return CountedTokens(classes) if are_counted(last, logits.size) else BinnedTokens(classes, last)
