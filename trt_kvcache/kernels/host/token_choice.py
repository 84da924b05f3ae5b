"""The token that a random number chooses from logits, by the definition of :mod:`~trt_kvcache.kernels.host.token_weights`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.kernels.host.most_likely import most_likely
from trt_kvcache.kernels.host.scratch import scratch
from trt_kvcache.kernels.host.token_weights import (
    FRACTION_BITS,
    NUM_CLASSES,
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

_Float64 = npt.NDArray[np.float64]

#: Up to so many tokens are sorted; more are first counted in bins of so many classes.
_FEW, _BIN_BITS = 2048, 11

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
            likely = np.flatnonzero((logits if tokens is None else logits[tokens]) >= np.float32(_lowest_likely(largest, params)))
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
        weights[weights < params.min_weight] = 0
    ends = np.cumsum(np.add.reduceat(weights, np.arange(0, weights.size, _BLOCK), dtype=np.float64))
    target = _target(random, ends[-1])
    block = int(np.searchsorted(ends, target, side="right"))
    before = ends[block - 1] if block else 0.0
    sums = before + np.cumsum(weights[block * _BLOCK : (block + 1) * _BLOCK], dtype=np.float64)
    return block * _BLOCK + int(np.searchsorted(sums, target, side="right"))


# --- the most likely first ---


def _place_in_nucleus(logits: Float32, largest: Any, random: int, params: ChoiceParams) -> int:
    classes = scratch.array("all classes", "int32", logits.size)
    token_classes(logits, largest, params.scale, out=classes)
    if logits.size <= _FEW:
        return _place_in_sorted(classes, random, params)
    return _place_by_bins(classes, random, params)


def _weights_of(classes: npt.NDArray[np.int32]) -> Float32:
    return class_weights(np.array(classes), out=np.empty(classes.size, np.float32))


def _nucleus_target(top_p: int, total: int) -> int:
    """Return the sum that the last token of the nucleus is the first to exceed."""
    return (top_p * total + (1 << RANDOM_BITS) - 1 >> RANDOM_BITS) - 1


def _place_in_sorted(classes: npt.NDArray[np.int32], random: int, params: ChoiceParams) -> int:
    """Return the place by the definition: sort all tokens."""
    order = np.argsort(classes, kind="stable")
    weights = _weights_of(classes[order])
    sums = np.cumsum(weights, dtype=np.float64)
    count = int(np.searchsorted(sums, _nucleus_target(params.top_p, int(sums[-1])), side="right")) + 1
    count = min(count, int(np.count_nonzero(weights >= params.min_weight)))
    return int(order[np.searchsorted(sums, _target(random, sums[count - 1]), side="right")])


def _place_by_bins(classes: npt.NDArray[np.int32], random: int, params: ChoiceParams) -> int:
    """Return the place without sorting: only the bins in which the nucleus ends and in which the random number falls are looked into."""
    weights = scratch.array("weights", "float32", classes.size)
    bins = scratch.array("bins", "intp", classes.size)
    chunk = scratch.array("classes", "int32", min(classes.size, 1 << 14))
    for start in range(0, classes.size, 1 << 14):
        part = slice(start, start + (1 << 14))
        np.right_shift(classes[part], _BIN_BITS, out=bins[part])
        few = chunk[: classes[part].size]
        np.copyto(few, classes[part])
        class_weights(few, out=weights[part])
    ends = np.cumsum(np.bincount(bins, weights, minlength=(NUM_CLASSES >> _BIN_BITS) + 1))

    def find(target: int) -> tuple[int, float]:
        """Return the first token, in order, with which the sum exceeds the target, and that sum."""
        chosen = int(np.searchsorted(ends, target, side="right"))
        members = np.flatnonzero(bins == chosen)
        members = members[np.argsort(classes[members], kind="stable")]
        sums = (ends[chosen - 1] if chosen else 0.0) + np.cumsum(weights[members], dtype=np.float64)
        place = int(np.searchsorted(sums, target, side="right"))
        return int(members[place]), float(sums[place])

    _, total = find(_nucleus_target(params.top_p, int(ends[-1])))
    if params.min_weight:
        total = min(total, float(weights[weights >= params.min_weight].sum(dtype=np.float64)))
    return find(_target(random, total))[0]
