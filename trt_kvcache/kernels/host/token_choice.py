"""The token that a random number chooses from logits, by the definition of :mod:`~trt_kvcache.kernels.host.token_weights`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from trt_kvcache.kernels.host.most_likely import most_likely
from trt_kvcache.kernels.host.scratch import scratch
from trt_kvcache.kernels.host.token_weights import (
    CHUNK,
    FRACTION_BITS,
    RANDOM_BITS,
    WEIGHT_BITS,
    Float32,
    class_weights,
    min_weight,
    scale_of,
    token_classes,
    token_weights,
    top_p_bits,
)

Float64 = np.ndarray[Any, np.dtype[np.float64]]

#: Up to so many tokens are sorted. Of more, so many are taken as a sample.
_FEW, _SAMPLE = 2048, 2400

#: Which token of the sorted sample the most likely tokens, which are sorted, end with; and how far off the sample may be.
_FIRST_OF_SAMPLE, _SLACK = 15, 120

#: Tokens near a target are counted in at most so many bins, as a power of 2.
_BIN_BITS = 11

#: Tokens whose weights are added up together, when a place among all sums is looked for.
_BLOCK = 512


@dataclass(frozen=True)
class ChoiceParams:
    """How a token is chosen, as the numbers of the definition.

    Parameters
    ----------
    scale : float
        What distances of logits are multiplied with; a float32.
    top_k : int
        Keep so many tokens; 0 for all.
    top_p : int
        Times ``2**53``, rounded up; 0 for all.
    min_weight : int
        Drop tokens of a smaller weight.
    """

    scale: float
    top_k: int = 0
    top_p: int = 0
    min_weight: int = 0


def choice_params(temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> ChoiceParams:
    """Return the numbers that stand for fields of ``SamplingParams``.

    Parameters
    ----------
    temperature : float
        Above 0.
    top_k, top_p, min_p : int, float, float
        As of ``SamplingParams``.
    """
    return ChoiceParams(scale_of(temperature), top_k, top_p_bits(top_p), min_weight(min_p))


def choose_token(logits: Float32, *, uniform: float, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> int:
    """Return the token that a random number chooses.

    Parameters
    ----------
    logits : ndarray (vocab,) float32
        On the host, without NaN; the largest is finite. Not changed.
    uniform : float
        The random number, from 0 to less than 1: a multiple of ``2**-53``, or it is rounded down to one.
    temperature : float
        Above 0.
    top_k, top_p, min_p : int, float, float
        As of ``SamplingParams``.

    Returns
    -------
    int
        Token id.

    Examples
    --------
    >>> import numpy as np
    >>> from trt_kvcache.kernels.host.token_choice import choose_token
    >>> logits = np.log(np.array([0.25, 0.5, 0.25], np.float32))
    >>> [choose_token(logits, uniform=u, temperature=1.0) for u in (0.2, 0.3, 0.7, 0.8)]
    [0, 1, 1, 2]
    """
    return choose_place(logits, int(uniform * 2.0**RANDOM_BITS), choice_params(temperature, top_k, top_p, min_p))


def choose_place(logits: Float32, random: int, params: ChoiceParams) -> int:
    """Return the token that random bits choose.

    Parameters
    ----------
    logits : ndarray (vocab,) float32
        On the host, without NaN; the largest is finite. Not changed.
    random : int
        From 0 to ``2**53 - 1``.
    params : ChoiceParams
        Of the row.

    Returns
    -------
    int
        Token id.
    """
    largest = logits.max()
    tokens = most_likely(logits, params.top_k) if 0 < params.top_k < logits.size else None
    with np.errstate(over="ignore", invalid="ignore"):  # distances to -inf
        if params.min_weight and not params.top_p:
            # Only an estimate from above, so that few tokens are left: their weights are compared later.
            is_likely = (logits if tokens is None else logits[tokens]) >= np.float32(_lowest_likely(largest, params))
            if 4 * np.count_nonzero(is_likely) < logits.size:
                likely = np.flatnonzero(is_likely)
                tokens = likely if tokens is None else tokens[likely]
        kept = logits if tokens is None else logits[tokens]
        place = _place_in_nucleus(kept, largest, random, params) if params.top_p else _place(kept, largest, random, params)
    return place if tokens is None else int(tokens[place])


def _lowest_likely(largest: Any, params: ChoiceParams) -> float:
    """Return a logit below which weights are less than ``min_weight``."""
    distance = (2.0**FRACTION_BITS * (WEIGHT_BITS - math.log2(params.min_weight)) + 2) / params.scale
    return float(max(float(largest) - distance * (1 + 1e-5) - 1e-5 * abs(float(largest)), -3e38))


def _target(random: int, total: float) -> int:
    """Return the sum that the chosen token is the first to exceed."""
    return random * int(total) >> RANDOM_BITS


# --- in the order of the ids ---


def _place(logits: Float32, largest: Any, random: int, params: ChoiceParams) -> int:
    weights = token_weights(logits, largest, params.scale, out=scratch.array("weights", "float32", logits.size))
    if params.min_weight:
        np.multiply(weights, weights >= params.min_weight, out=weights)
    ends = np.cumsum(np.add.reduceat(weights, np.arange(0, weights.size, _BLOCK), dtype=np.float64))
    target = _target(random, ends[-1])
    block = int(np.searchsorted(ends, target, side="right"))
    before = ends[block - 1] if block else 0.0
    sums = before + np.cumsum(weights[block * _BLOCK : (block + 1) * _BLOCK], dtype=np.float64)
    return block * _BLOCK + int(np.searchsorted(sums, target, side="right"))


# --- the most likely first ---


def _place_in_nucleus(logits: Float32, largest: Any, random: int, params: ChoiceParams) -> int:
    size, total = logits.size, 0
    classes, weights = scratch.array("all classes", "int32", size), scratch.array("exact weights", "float64", size)
    for start in range(0, size, CHUNK):
        part = slice(start, start + CHUNK)
        of_chunk = scratch.array("classes", "int32", classes[part].size)
        np.copyto(of_chunk, token_classes(logits[part], largest, params.scale, out=classes[part]))
        weights[part] = class_weights(of_chunk, out=scratch.array("weights", "float32", of_chunk.size))
        total += int(weights[part].sum())
    tokens = Ordered(classes, weights, total)
    _, kept = tokens.find(_nucleus_target(params.top_p, total))
    if params.min_weight:
        kept = min(kept, int(np.multiply(weights, weights >= params.min_weight).sum()))
    return tokens.find(_target(random, kept))[0]


def _nucleus_target(top_p: int, total: int) -> int:
    """Return the sum that the last token of the nucleus is the first to exceed."""
    return (top_p * total + (1 << RANDOM_BITS) - 1 >> RANDOM_BITS) - 1


class Ordered:
    """Tokens in the order of their classes, then of their ids, of which only few are sorted.

    Parameters
    ----------
    classes : ndarray (n,) int32
        Of the tokens.
    weights : ndarray (n,) float64
        Theirs: integers.
    total : int
        Their sum.
    """

    def __init__(self, classes: np.ndarray[Any, np.dtype[np.int32]], weights: Float64, total: int) -> None:
        self._classes, self._weights, self._total = classes, weights, total
        if classes.size > _FEW:
            self._sample = np.sort(classes[:: max(classes.size // _SAMPLE, 1)])
            of_sample = class_weights(self._sample.copy(), out=np.empty(self._sample.size, np.float32))
            self._sums_of_sample = np.cumsum(of_sample, dtype=np.float64)
            self._few: Any = None
            self._first = self._sorted(np.flatnonzero(classes <= self._sample[min(_FIRST_OF_SAMPLE, self._sample.size - 1)]))
        else:
            self._first = self._sorted(np.arange(classes.size))

    def find(self, target: int) -> tuple[int, int]:
        """Return the first token with which the sum of the weights exceeds a target, and that sum.

        Parameters
        ----------
        target : int
            At least 0, less than the sum of all weights.
        """
        members, sums = self._first
        if target >= sums[-1]:
            members, sums = self._near(target)
        place = int(np.searchsorted(sums, target, side="right"))
        return int(members[place]), int(sums[place])

    def _sorted(
        self, members: np.ndarray[Any, np.dtype[np.intp]], before: float = 0.0
    ) -> tuple[np.ndarray[Any, np.dtype[np.intp]], Float64]:
        """Return tokens in order, and the sum up to each."""
        members = members[np.argsort(self._classes[members], kind="stable")]
        return members, before + np.cumsum(self._weights[members])

    def _near(self, target: int) -> tuple[np.ndarray[Any, np.dtype[np.intp]], Float64]:
        """Return tokens, in order, of which one reaches the target: from a range of classes that a sample of the tokens suggests."""
        sample = self._sample
        place = int(np.searchsorted(self._sums_of_sample, target / self._total * self._sums_of_sample[-1]))
        low, high = int(sample[max(place - _SLACK, 0)]), int(sample[min(place + _SLACK, sample.size - 1)])
        if place + _SLACK < sample.size // 4 and self._few is None:
            few = np.flatnonzero(self._classes <= high)  # a next target is likely to be among them too
            self._few = few, self._classes[few], self._weights[few], high
        if self._few is not None and high <= self._few[3]:
            ids, classes, weights, _ = self._few
        else:
            ids, classes, weights = None, self._classes, self._weights
        below = scratch.array("below", "float64", classes.size)
        before = float(np.multiply(weights, classes < low, out=below).sum())
        members = np.flatnonzero((classes >= low) & (classes <= high))
        if ids is not None:
            members = ids[members]
        if not before <= target < before + self._weights[members].sum():  # the sample was misleading
            low, high, before, members = 0, int(self._classes.max()), 0.0, np.arange(self._classes.size)
        bins = self._classes[members] - low >> max((high - low).bit_length() - _BIN_BITS, 0)
        ends = before + np.cumsum(np.bincount(bins, self._weights[members]))
        chosen = int(np.searchsorted(ends, target, side="right"))
        return self._sorted(members[bins == chosen], ends[chosen - 1] if chosen else before)
