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

#: More tokens than so many are searched for those of the nucleus first, with the help of a sample of about so many.
_FEW, _SAMPLE = 2048, 2400

#: Which share of the weights behind the nucleus is left out of the search: less than all, since a sample is not exact.
_SHARE_BEHIND = 0.8

#: Classes are counted if there are so many times more tokens; otherwise tokens are in at most so many bins, as a power of 2.
_TOKENS_PER_CLASS, _BIN_BITS = 2, 11

#: Bound of the relative error of a sum of estimated weights. Half a class is 5.3e-6 of a weight. Exponents are off by three roundings,
#: 2.5e-6: their mean, by weight, is at most the logarithm of the number of tokens, as the entropy is. The exponential function and the
#: polynomial have errors of 6e-7, the pairwise sum in float32 one of 2e-6. Besides, each weight is rounded down by less than 1.
_ERROR = 1.2e-5

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


def choose_token(logits: Float32, largest: Any, random: int, params: ChoiceParams) -> int:
    """Return the token that random bits choose.

    Parameters
    ----------
    logits : ndarray (vocab,) float32
        On the host, without NaN. Not changed.
    largest : float32
        The largest of them, finite.
    random : int
        From 0 to ``2**53 - 1``.
    params : ChoiceParams
        Of the row.

    Returns
    -------
    int
        Token id.

    Examples
    --------
    >>> import numpy as np
    >>> from trt_kvcache.kernels.host.token_choice import choice_params, choose_token
    >>> logits = np.log(np.array([0.25, 0.5, 0.25], np.float32))
    >>> [choose_token(logits, logits.max(), int(u * 2**53), choice_params(temperature=1.0)) for u in (0.2, 0.3, 0.7, 0.8)]
    [0, 1, 1, 2]
    """
    tokens = most_likely(logits, params.top_k) if 0 < params.top_k < logits.size else None
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # distances to -inf
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


def _nucleus_target(top_p: int, total: int) -> int:
    """Return the sum that the last token of the nucleus is the first to exceed."""
    return (top_p * total + (1 << RANDOM_BITS) - 1 >> RANDOM_BITS) - 1


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
    """Return the place, from exact weights of few tokens and bounds of the sum of all others if that tells, or else from all."""
    sample = logits[:: max(logits.size // _SAMPLE, 1)]
    if logits.size > _FEW and float(largest - sample.min()) * params.scale >= logits.size / _TOKENS_PER_CLASS:
        likely, others = _likely_tokens(logits, sample, largest, params)
        tokens = Ordered(logits[likely], largest, params.scale)
        first, last = (_choose_in_nucleus(tokens, bound, random, params) for bound in others)
        if first == last is not None:  # a larger sum moves both borders towards less likely tokens: those between choose the same one
            return int(likely[last])
    place = _choose_in_nucleus(Ordered(logits, largest, params.scale), None, random, params)
    assert place is not None
    return place


def _likely_tokens(
    logits: Float32, sample: Float32, largest: Any, params: ChoiceParams
) -> tuple[np.ndarray[Any, np.dtype[np.intp]], tuple[int, int]]:
    """Return the largest logits, probably with all of the nucleus, and bounds of the sum of the weights of all others."""
    weights = scratch.array("weights", "float32", logits.size)
    total = 0.0
    for start in range(0, logits.size, CHUNK):
        part = slice(start, start + CHUNK)
        total += float(_estimate(logits[part], largest, params, out=weights[part]).sum())
    sample = np.sort(sample)
    sums = np.cumsum(_estimate(sample, largest, params, out=np.empty_like(sample)), dtype=np.float64)
    behind = _SHARE_BEHIND * (1 - params.top_p / 2**RANDOM_BITS) * total * sample.size / logits.size
    lowest = sample[min(int(np.searchsorted(sums, behind)), sample.size - 1)]
    likely = np.flatnonzero(logits >= lowest)
    weights[likely] = 0
    others = math.ldexp(float(weights.sum()), WEIGHT_BITS)
    return likely, (max(int(others * (1 - _ERROR)) - logits.size, 0), int(others * (1 + _ERROR)) + 1)


def _estimate(logits: Float32, largest: Any, params: ChoiceParams, *, out: Float32) -> Float32:
    """Return about the weights, as parts of the largest."""
    np.subtract(logits, largest, out=out)
    np.multiply(out, np.float32(params.scale * math.log(2) / (1 << FRACTION_BITS)), out=out)
    return np.exp(out, out=out)


def _choose_in_nucleus(tokens: Ordered, others: int | None, random: int, params: ChoiceParams) -> int | None:
    """Return the token that is chosen if all others weigh so much; None if the nucleus may contain one of those. None for no others."""
    end = tokens.find(_nucleus_target(params.top_p, tokens.total + (others or 0)))
    if end is None or (others is not None and end.in_last_class):
        return None
    kept = min(end.sum, tokens.sum_of_at_least(params.min_weight)) if params.min_weight else end.sum
    chosen = tokens.find(_target(random, kept))
    assert chosen is not None
    return chosen.token


@dataclass(frozen=True)
class Found:
    """A token with which the sum of the weights exceeds a target.

    Parameters
    ----------
    token : int
        Its place.
    sum : int
        Of the weights up to it.
    in_last_class : bool
        Whether no token has a smaller weight.
    """

    token: int
    sum: int
    in_last_class: bool


class Ordered:
    """Tokens in the order of their classes, then of their ids, of which only few are sorted.

    Parameters
    ----------
    logits : ndarray (n,) float32
        Of the tokens.
    largest : float32
        Of all tokens, these or others.
    scale : float
        Of :func:`~trt_kvcache.kernels.host.token_weights.scale_of`.

    Notes
    -----
    Tokens are in bins of neighbouring classes, or, if there are few classes, of one class each: then they are counted, and only the weights
    of classes are computed.
    """

    def __init__(self, logits: Float32, largest: Any, scale: float) -> None:
        self._classes = token_classes(logits, largest, scale, out=scratch.array("classes of all", "int32", logits.size))
        self._last = int(self._classes.max())
        self._counted = self._last < logits.size / _TOKENS_PER_CLASS
        if self._counted:
            self._bins = self._classes
            self._weights = class_weights(np.arange(self._last + 1, dtype=np.int32), out=np.empty(self._last + 1, np.float32))
            self._sums = self._weights * np.bincount(self._bins)
            self._ends = np.cumsum(self._sums)
        else:
            bin_bits = _BIN_BITS if logits.size > _FEW else 0  # a few are in one bin: they are sorted
            self._bins = self._classes >> max(self._last.bit_length() - bin_bits, 0)
            self._weights = class_weights(self._classes, out=scratch.array("weights of all", "float32", logits.size))
            self._sums = self._weights
            self._ends = np.cumsum(np.bincount(self._bins, self._weights))
        self._sorted: dict[int, tuple[np.ndarray[Any, np.dtype[np.intp]], np.ndarray[Any, np.dtype[np.float64]]]] = {}
        #: The sum of all weights.
        self.total = int(self._ends[-1])

    def sum_of_at_least(self, weight: int) -> int:
        """Return the sum of the weights that are not less than one."""
        return int(np.sum(self._sums * (self._weights >= weight), dtype=np.float64))

    def find(self, target: int) -> Found | None:
        """Return the first token with which the sum of the weights exceeds a target; None if the sum of all does not.

        Parameters
        ----------
        target : int
            At least 0.
        """
        if target >= self.total:
            return None
        members, sums = self._members(int(np.searchsorted(self._ends, target, side="right")))
        place = int(np.searchsorted(sums, target, side="right"))
        token = int(members[place])
        return Found(token, int(sums[place]), bool(self._classes[token] == self._last))

    def _members(self, chosen: int) -> tuple[np.ndarray[Any, np.dtype[np.intp]], np.ndarray[Any, np.dtype[np.float64]]]:
        """Return the tokens of a bin, in order, and the sums up to each."""
        if chosen not in self._sorted:
            members = np.flatnonzero(self._bins == chosen)
            members = members[np.argsort(self._classes[members], kind="stable")]
            weights = self._weights[self._classes[members] if self._counted else members]
            before = self._ends[chosen - 1] if chosen else 0.0
            self._sorted[chosen] = members, before + np.cumsum(weights, dtype=np.float64)
        return self._sorted[chosen]
