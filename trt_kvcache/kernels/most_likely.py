"""The most likely tokens of a vocabulary, without sorting it; and log-probabilities: the log-softmax of logits."""

from __future__ import annotations

from typing import Any

import numpy as np

#: Groups of a vocabulary, for a bound of the k-th largest logit: per wanted token, and at least.
_GROUPS_PER_TOKEN, _MIN_GROUPS = 4, 1024


def most_likely(logits: np.ndarray[Any, np.dtype[np.float32]], count: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Return the ``count`` tokens with the largest logits, which have no NaN, in the order of ids; of equal logits the lowest ids."""
    # The smallest of the maxima of any k disjoint groups is a lower bound of the k-th largest logit, so two passes over the vocabulary
    # leave few candidates. Tokens with exactly the logit of the bound are counted, not sorted: with a grammar most tokens may have it.
    if count >= logits.size:
        return np.arange(logits.size)
    if not count:
        return np.empty(0, np.intp)
    bound = _bound(logits, count)
    candidates = np.flatnonzero(logits >= bound)
    of_candidates = logits[candidates]
    kept = of_candidates > bound
    above = int(np.count_nonzero(kept))
    if above > count:
        bound = np.partition(of_candidates[kept], above - count)[above - count]
        kept = of_candidates > bound
        above = int(np.count_nonzero(kept))
    tied = np.flatnonzero(of_candidates == bound)
    kept[tied[: count - above]] = True
    chosen: np.ndarray[Any, np.dtype[np.intp]] = candidates[kept]
    return chosen


def _bound(logits: np.ndarray[Any, np.dtype[np.float32]], count: int) -> np.float32:
    """Return a lower bound of the ``count``-th largest logit, which is one of the logits."""
    groups = max(_GROUPS_PER_TOKEN * count, _MIN_GROUPS)
    rows = logits.size // groups
    maxima = logits if rows < 2 else logits[: rows * groups].reshape(rows, groups).max(axis=0)
    place = maxima.size - count
    bound: np.float32 = np.partition(maxima, place)[place]
    return bound


def log_probabilities(
    logits: np.ndarray[Any, np.dtype[np.float32]], token: int, count: int
) -> tuple[float, np.ndarray[Any, np.dtype[np.intp]], np.ndarray[Any, np.dtype[np.float64]]]:
    """Return the log-probability of a token; and the ``count`` most likely tokens, the likeliest first, with their log-probabilities."""
    largest = logits.max()
    with np.errstate(invalid="ignore"):
        total = float(largest) + float(np.log(np.exp(logits - largest).sum(dtype=np.float64)))
    top: np.ndarray[Any, Any] = most_likely(logits, min(count, logits.size))
    top = top[np.argsort(-logits[top], kind="stable")]
    return float(logits[token]) - total, top, logits[top].astype(np.float64) - total
