"""The token that a random number chooses from logits, without sorting a vocabulary and mostly without exact sums over it.

What is chosen is defined by sums in float64 (see :func:`choose_token`). They are slow over a vocabulary, so the place of the random number
among them is found from sums that are faster, with a bound of their error. If the number is so close to the edge of a token that the
error could matter, a more exact sum decides, and in the end the one of the definition.
"""

import math
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.generation.most_likely import most_likely

_Float32 = npt.NDArray[np.float32]
_Float64 = npt.NDArray[np.float64]

#: Up to so many tokens, the sums of the definition are computed at once.
_FEW = 2048

#: How many of the most likely tokens are searched for the top-p nucleus before the whole vocabulary is.
_NUCLEUS_CANDIDATES = 1024

#: Tokens whose weights are added up together, when a place among all sums is looked for.
_BLOCK = 128

#: Bins that tokens are divided into by their logits, instead of sorting them, and temperatures below the largest logit that they span.
_BINS, _SPAN = 4096, 64.0

#: Bound of the relative error of a sum of weights in float64, in whatever order they are added, for vocabularies of up to 2**20 tokens.
_ERROR = 1e-9

#: Smallest temperature for weights in float32.
_SMALLEST_TEMPERATURE = 1e-20


class _Scratch(threading.local):
    """Arrays of a vocabulary that are used again: new ones of that size cost as much as what is computed in them."""

    def __init__(self) -> None:
        self._arrays: dict[str, npt.NDArray[Any]] = {}

    def array(self, dtype: str, size: int) -> npt.NDArray[Any]:
        """Return an array of any content, the same one for each dtype."""
        array = self._arrays.get(dtype)
        if array is None or array.size < size:
            self._arrays[dtype] = array = np.empty(size, dtype)
        return array[:size]


_scratch = _Scratch()


def choose_token(logits: _Float32, *, uniform: float, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> int:
    """Return the token that a random number chooses.

    Parameters
    ----------
    logits : ndarray (vocab,) float32
        On the host, without NaN; the largest is finite. Not changed.
    uniform : float
        The random number, from 0 to less than 1.
    temperature : float
        Above 0.
    top_k, top_p, min_p : int, float, float
        As of ``SamplingParams``.

    Returns
    -------
    int
        Token id.

    Notes
    -----
    The weight of a token is ``exp((logit - largest) / temperature)``. Tokens are kept in the order of their ids; with ``top_p`` the most
    likely first, of equally likely ones the lowest id first. The chosen one is the first for which the sum of the weights up to it exceeds
    ``uniform`` times the sum of all that are kept.

    Examples
    --------
    >>> import numpy as np
    >>> from trt_kvcache.generation.token_choice import choose_token
    >>> logits = np.log(np.array([0.25, 0.5, 0.25], np.float32))
    >>> [choose_token(logits, uniform=u, temperature=1.0) for u in (0.2, 0.3, 0.7, 0.8)]
    [0, 1, 1, 2]
    """
    largest = logits.max()
    tokens = most_likely(logits, top_k) if 0 < top_k < logits.size else None
    if min_p > 0 and top_p >= 1:
        # Weights below min_p take part in nothing. The bound is a little too low, so that the exact comparison comes later.
        distance = -temperature * math.log(min_p) * (1 + 1e-5) + 1e-5 * abs(float(largest))
        likely = np.flatnonzero((logits if tokens is None else logits[tokens]) >= np.float32(max(float(largest) - distance, -3e38)))
        tokens = likely if tokens is None else tokens[likely]
    kept = logits if tokens is None else logits[tokens]
    with np.errstate(over="ignore", under="ignore"):  # a tiny temperature leaves only the most likely token
        if top_p < 1:
            place = _place_in_nucleus(kept, largest, uniform, temperature, top_p, min_p)
        else:
            place = _place(kept, largest, uniform, temperature, min_p)
    return place if tokens is None else int(tokens[place])


# --- in the order of the ids ---


def _place(logits: _Float32, largest: np.float32, uniform: float, temperature: float, min_p: float) -> int:
    size = logits.size
    if size > _FEW:
        if min_p == 0 and temperature >= _SMALLEST_TEMPERATURE:
            place = _place_by_blocks(_weights32(logits, largest, temperature), uniform, _error32(size), logits, largest, temperature)
            if place is not None:
                return place
        weights = _all_weights(logits, largest, temperature)
        weights[weights < min_p] = 0
        place = _place_by_blocks(weights, uniform, _ERROR)
        return _place_exactly(weights, uniform, min_p) if place is None else place
    return _place_exactly(_weights(logits, largest, temperature), uniform, min_p)


def _place_exactly(weights: _Float64, uniform: float, min_p: float) -> int:
    """Return the place by the definition."""
    kept = np.flatnonzero(weights >= min_p)
    sums = np.cumsum(weights[kept])
    place = int(np.searchsorted(sums, uniform * sums[-1], side="right"))
    return int(kept[min(place, kept.size - 1)])


def _place_by_blocks(
    weights: npt.NDArray[Any],
    uniform: float,
    error: float,
    logits: _Float32 | None = None,
    largest: np.float32 | None = None,
    temperature: float = 1.0,
) -> int | None:
    """Return the place, or None if it depends on errors of the sums.

    ``error`` bounds that of any sum of weights, relative to the sum of all. With ``logits``, the weights inside of one block are computed
    again, in float64.
    """
    starts = np.arange(0, weights.size, _BLOCK)
    ends = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    wanted, slack = uniform * ends[-1], 2 * error * ends[-1]
    block = int(np.searchsorted(ends, wanted, side="right"))
    if block == ends.size:
        return None
    before = ends[block - 1] if block else 0.0
    part = slice(block * _BLOCK, (block + 1) * _BLOCK)
    if logits is None or largest is None:
        inside = weights[part].astype(np.float64)
    else:
        inside = _weights(logits[part], largest, temperature)
    sums = before + np.cumsum(inside)
    place = int(np.searchsorted(sums, wanted, side="right"))
    if place == sums.size:
        return None
    low = sums[place - 1] if place else before
    certain = wanted - low > slack and sums[place] - wanted > slack
    return block * _BLOCK + place if certain else None


# --- the most likely first ---


def _place_in_nucleus(logits: _Float32, largest: np.float32, uniform: float, temperature: float, top_p: float, min_p: float) -> int:
    size = logits.size
    if size <= _FEW:
        weights = _weights(logits, largest, temperature)
        return _place_in_sorted(logits, largest, weights, top_p * weights.sum(), uniform, min_p)
    first = most_likely(logits, _NUCLEUS_CANDIDATES)
    first = first[_descending(logits[first], largest)]
    of_first = _weights(logits[first], largest, temperature)
    sums = np.cumsum(of_first)
    count = None
    if temperature >= _SMALLEST_TEMPERATURE:
        total = float(_weights32(logits, largest, temperature).sum(dtype=np.float64))
        count = _count(sums, top_p * total, 2 * _error32(size) * total)
    if count is None:
        weights = _all_weights(logits, largest, temperature)
        wanted = top_p * weights.sum()
        if sums[-1] < wanted:
            place = _place_by_bins(logits, largest, weights, temperature, wanted, uniform, min_p)
            return _place_in_sorted(logits, largest, weights, wanted, uniform, min_p) if place is None else place
        count = int(np.searchsorted(sums, wanted)) + 1
    return int(first[_place_exactly(of_first[:count], uniform, min_p)])


def _count(sums: _Float64, wanted: float, slack: float) -> int | None:
    """Return how many tokens reach ``wanted``; None if more than there are, or if that depends on the error of ``wanted``."""
    low, high = np.searchsorted(sums, (wanted - slack, wanted + slack))
    return int(low) + 1 if low == high < sums.size else None


def _place_in_sorted(logits: _Float32, largest: np.float32, weights: _Float64, wanted: float, uniform: float, min_p: float) -> int:
    """Return the place by the definition: sort all tokens."""
    order = _descending(logits, largest)
    of_sorted = weights[order]
    count = int(np.searchsorted(np.cumsum(of_sorted), wanted)) + 1
    return int(order[_place_exactly(of_sorted[:count], uniform, min_p)])


def _place_by_bins(
    logits: _Float32,
    largest: np.float32,
    weights: _Float64,
    temperature: float,
    wanted: float,
    uniform: float,
    min_p: float,
) -> int | None:
    """Return the place in a nucleus of many tokens, or None if it depends on errors of the sums.

    Tokens are divided into bins by how far they are below the largest, and only the bins in which the nucleus ends and in which the random
    number falls are sorted.
    """
    span = min(float(np.float64(largest) - np.float64(logits.min())), _SPAN * temperature)
    if not (0 < span < math.inf):
        return None
    places = _scratch.array("float32", logits.size)
    np.subtract(largest, logits, out=places)
    np.multiply(places, np.float32(_BINS / span), out=places)
    np.minimum(places, np.float32(_BINS - 1), out=places)
    bins = _scratch.array("intp", logits.size)
    np.copyto(bins, places, casting="unsafe")
    ends = np.cumsum(np.bincount(bins, weights, minlength=_BINS))
    slack = 2 * _ERROR * ends[-1]

    def search(target: float, side: Any) -> tuple[int, float, float] | None:
        """Return the token at which the sum reaches a target, the sum up to it and its weight; None if that is not certain."""
        chosen = int(np.searchsorted(ends, target, side=side))
        if chosen == _BINS:
            return None
        members = np.flatnonzero(bins == chosen)
        members = members[_descending(logits[members], largest)]
        before = ends[chosen - 1] if chosen else 0.0
        sums = before + np.cumsum(weights[members])
        place = int(np.searchsorted(sums, target, side=side))
        if place == sums.size:
            return None
        low = sums[place - 1] if place else before
        certain = target - low > slack and sums[place] - target > slack
        return (int(members[place]), float(sums[place]), float(weights[members[place]])) if certain else None

    last = search(wanted, "left")
    if last is None:
        return None
    _, total, smallest = last
    if smallest < min_p:
        total = float(weights[weights >= min_p].sum())
    found = search(uniform * total, "right")
    return None if found is None else found[0]


# --- weights ---


def _descending(logits: _Float32, largest: np.float32) -> npt.NDArray[np.intp]:
    """Return the places of logits, the most likely first; of equally likely ones the first."""
    return np.argsort(np.float64(largest) - logits.astype(np.float64), kind="stable")


def _weights(logits: _Float32, largest: np.float32, temperature: float, *, out: _Float64 | None = None) -> _Float64:
    """Return the weights of the definition."""
    weights = np.empty(logits.size) if out is None else out
    np.copyto(weights, logits)
    np.subtract(weights, largest, out=weights)
    np.divide(weights, temperature, out=weights)
    np.exp(weights, out=weights)
    return weights


def _all_weights(logits: _Float32, largest: np.float32, temperature: float) -> _Float64:
    """Return the weights of the definition, in an array that the next call overwrites."""
    return _weights(logits, largest, temperature, out=_scratch.array("float64", logits.size))


def _weights32(logits: _Float32, largest: np.float32, temperature: float) -> _Float32:
    """Return the weights in float32, in an array that the next call overwrites."""
    weights = _scratch.array("float32", logits.size)
    np.subtract(logits, largest, out=weights)
    np.divide(weights, np.float32(temperature), out=weights)
    np.exp(weights, out=weights)
    return weights


def _error32(size: int) -> float:
    """Return a bound of the relative error of a sum of weights in float32.

    A weight exp(x) has a relative error of 3 * 2**-24 * |x| from its exponent (difference, temperature, quotient), and one of 2 units in
    the last place. The mean of |x|, weighted with the weights, is at most the logarithm of the number of tokens, because their entropy is.
    """
    return 2.0**-24 * (3 * math.log(size) + 4)
