"""The token that a random number chooses from logits, as :mod:`~trt_kvcache.kernels.token_weights` defines it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from trt_kvcache.kernels.most_likely import most_likely
from trt_kvcache.kernels.ordered_tokens import FEW, BinnedTokens, CountedTokens, Found, Places, are_counted, in_order
from trt_kvcache.kernels.scratch import scratch
from trt_kvcache.kernels.token_weights import (
    FRACTION_BITS,
    RANDOM_BITS,
    WEIGHT_BITS,
    Float32,
    min_weight,
    scale_of,
    token_weights,
    top_p_bits,
)

#: Logits of a sample, from which the threshold of the nucleus (top-p) is estimated.
_SAMPLE = 1200

#: The largest share of likely tokens for which only these are sorted: with more, sorting all takes less time.
_FEW_ENOUGH = 0.35

#: Share of the weights after the nucleus that the search excludes: less than all, since a sample is not exact.
_SHARE_EXCLUDED = 0.8

#: Tokens of the sample that are searched at least: near the likeliest ones a sample is least exact.
_LIKELIEST = 2

#: Bound of the relative error of a sum of estimated weights. Half a class is 5.3e-6 of a weight. Three roundings of an exponent are 2.5e-6:
#: the weighted mean of the exponents is at most the logarithm of the number of tokens, as the entropy is. The exponential function and the
#: polynomial have errors of 6e-7, the pairwise sum in float32 of 2e-6. Besides, each weight is rounded down by less than 1.
_ERROR = 1.2e-5

#: Tokens without a weight are excluded first if at most 1 of 4 has one; with top-k or min-p, which exclude more of them, 1 of 32.
_TOKENS_PER_WEIGHT, _TOKENS_PER_WEIGHT_CUT = 4, 32

#: The smallest logit that is not -inf.
_SMALLEST = float(np.finfo(np.float32).min)

#: Tokens of a block of the search: first the block is found in the sums of blocks, then the token in the block.
_BLOCK = 512


@dataclass(frozen=True)
class ChoiceParams:
    """Sampling parameters, as the numbers of the definition."""

    scale: float  # factor of distances of logits, a float32
    top_k: int = 0  # 0 for all
    top_p: int = 0  # times 2**53, rounded up; 0 for all
    min_weight: int = 0  # tokens of smaller weights are dropped


def choice_params(temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> ChoiceParams:
    """Return the numbers of the definition for fields of ``SamplingParams``; the temperature is above 0."""
    return ChoiceParams(scale_of(temperature), top_k, top_p_bits(top_p), min_weight(min_p))


def choose_token(logits: Float32, largest: Any, random: int, params: ChoiceParams) -> int:
    """Return the token that 53 random bits choose from finite or -inf logits, of which ``largest`` is the largest and finite."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # distances to -inf
        tokens = _tokens_with_weight(logits, largest, params)
        kept = logits if tokens is None else logits[tokens]
        if 0 < params.top_k < kept.size:
            tokens = _of(tokens, most_likely(kept, params.top_k))
            kept = logits[tokens]
        if params.min_weight and not params.top_p:
            # An upper estimate that leaves few tokens: their weights are compared later.
            is_likely = kept >= _lowest_of_weight(params.min_weight, largest, params.scale)
            if 4 * np.count_nonzero(is_likely) < logits.size:
                tokens = _of(tokens, np.flatnonzero(is_likely))
                kept = logits[tokens]
        place = _place_in_nucleus(kept, largest, random, params) if params.top_p else _place(kept, largest, random, params)
    return place if tokens is None else int(tokens[place])


def _of(tokens: Places | None, places: Places) -> Places:
    """Return the tokens at some places of ``tokens``, of which None means all."""
    return places if tokens is None else tokens[places]


def _tokens_with_weight(logits: Float32, largest: Any, params: ChoiceParams) -> Places | None:
    """Return the tokens that may have a weight if, by a sample, they are few (a grammar, a bias or a function excluded others); else None.

    Tokens without a weight are never chosen, and come after all others, so they do not change the choice.
    """
    lowest = _lowest_of_weight(1, largest, params.scale)
    sample = logits[:: max(logits.size // _SAMPLE, 1)]
    tokens_per_weight = _TOKENS_PER_WEIGHT_CUT if 0 < params.top_k < logits.size or params.min_weight else _TOKENS_PER_WEIGHT
    if tokens_per_weight * np.count_nonzero(sample >= lowest) >= sample.size:
        return None
    return np.flatnonzero(logits >= lowest)


def _lowest_of_weight(weight: int, largest: Any, scale: float) -> np.float32:
    """Return a logit below which weights are less than ``weight``."""
    distance = (2.0**FRACTION_BITS * (WEIGHT_BITS - math.log2(weight)) + 2) / scale
    lowest: np.float32 = np.float32(max(float(largest) - distance * (1 + 1e-5) - 1e-5 * abs(float(largest)), _SMALLEST))
    return lowest


def _target(random: int, total: float) -> int:
    """Return the sum that the chosen token is the first to exceed."""
    return random * int(total) >> RANDOM_BITS


def _nucleus_target(top_p: int, total: int) -> int:
    """Return the sum that the last token of the nucleus is the first to exceed."""
    return (top_p * total + (1 << RANDOM_BITS) - 1 >> RANDOM_BITS) - 1


# --- without top-p: in the order of ids ---


def _place(logits: Float32, largest: Any, random: int, params: ChoiceParams) -> int:
    weights = token_weights(logits, largest, params.scale, out=scratch.array("weights", "float32", logits.size))
    if params.min_weight and weights.min() < params.min_weight:
        np.multiply(weights, weights >= params.min_weight, out=weights)
    ends = np.cumsum(np.add.reduceat(weights, np.arange(0, weights.size, _BLOCK), dtype=np.float64))
    target = _target(random, ends[-1])
    block = int(np.searchsorted(ends, target, side="right"))
    before = ends[block - 1] if block else 0.0
    sums = before + np.cumsum(weights[block * _BLOCK : (block + 1) * _BLOCK], dtype=np.float64)
    return block * _BLOCK + int(np.searchsorted(sums, target, side="right"))


# --- with top-p: the most likely first ---


def _place_in_nucleus(logits: Float32, largest: Any, random: int, params: ChoiceParams) -> int:
    sample = logits[:: max(logits.size // _SAMPLE, 1)]
    if logits.size > FEW and not are_counted(float(largest - sample.min()) * params.scale, logits.size):
        place = _place_among_likely(logits, np.sort(sample), largest, random, params)
        if place is not None:
            return place
    tokens = in_order(logits, largest, params.scale)
    chosen = _choose_in_nucleus(tokens, None, random, params)
    assert chosen is not None
    return tokens.token_of(chosen)


def _place_among_likely(logits: Float32, sample: Float32, largest: Any, random: int, params: ChoiceParams) -> int | None:
    """Return the place from the exact weights of the likely tokens; None if these are not few, or the nucleus may contain others.

    Bounds of the sum of all other weights often suffice; otherwise the sum is computed.
    """
    sums = np.cumsum(_estimate(sample, largest, params, out=np.empty_like(sample)), dtype=np.float64)
    outside, step = 1 - params.top_p / 2**RANDOM_BITS, logits.size / sample.size
    if np.searchsorted(sums, outside * (sums[-1] + 1 / step)) < (1 - _FEW_ENOUGH) * sample.size:  # the largest may not be in the sample
        return None
    weights = _estimate(logits, largest, params, out=scratch.array("weights", "float32", logits.size))
    excluded = _SHARE_EXCLUDED * outside * float(np.einsum("i->", weights)) / step
    likely = np.flatnonzero(logits >= sample[min(int(np.searchsorted(sums, excluded)), sample.size - _LIKELIEST)])
    tokens = in_order(logits[likely], largest, params.scale)
    first, last = (_choose_in_nucleus(tokens, bound, random, params) for bound in _bounds_of_others(weights, likely))
    # A larger sum moves both thresholds towards less likely tokens: if the bounds choose different tokens, the exact sum decides.
    if first != last:
        total = int(token_weights(logits, largest, params.scale, out=weights).sum(dtype=np.float64))
        last = _choose_in_nucleus(tokens, total - tokens.total, random, params)
    return None if last is None else int(likely[tokens.token_of(last)])


def _bounds_of_others(weights: Float32, likely: Places) -> tuple[int, int]:
    """Return bounds of the sum of all weights but the weights of likely tokens, from estimates, which are overwritten."""
    weights[likely] = 0
    others = math.ldexp(float(weights.sum()), WEIGHT_BITS)
    return max(int(others * (1 - _ERROR)) - weights.size, 0), int(others * (1 + _ERROR)) + 1


def _estimate(logits: Float32, largest: Any, params: ChoiceParams, *, out: Float32) -> Float32:
    """Return estimates of the weights, relative to the largest."""
    np.subtract(logits, largest, out=out)
    np.multiply(out, np.float32(params.scale * math.log(2) / (1 << FRACTION_BITS)), out=out)
    return np.exp(out, out=out)


def _choose_in_nucleus(tokens: CountedTokens | BinnedTokens, others: int | None, random: int, params: ChoiceParams) -> Found | None:
    """Return the chosen token if ``others`` is the sum of all other weights; None if the nucleus may contain one of the other tokens."""
    end = tokens.find(_nucleus_target(params.top_p, tokens.total + (others or 0)))
    if end is None or (others is not None and end.in_last_class):
        return None
    kept = min(end.sum, tokens.sum_of_at_least(params.min_weight)) if params.min_weight else end.sum
    return tokens.find(_target(random, kept))
