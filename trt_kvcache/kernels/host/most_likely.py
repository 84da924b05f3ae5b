"""The most likely tokens of a vocabulary, without sorting it."""

from typing import Any

import numpy as np

#: Groups that a vocabulary is divided into to find a bound of the k-th largest logit, per token that is wanted, and at least.
_GROUPS_PER_TOKEN, _MIN_GROUPS = 4, 1024


def most_likely(logits: np.ndarray[Any, np.dtype[np.float32]], count: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Return the tokens with the largest logits.

    Parameters
    ----------
    logits : ndarray (vocab,) float32
        On the host, without NaN; the largest is finite.
    count : int
        How many tokens, from 0 to ``vocab``.

    Returns
    -------
    ndarray (count,) intp
        In the order of their ids. Of equally likely tokens those with the lowest ids. Equal are logits whose distance to the largest
        one is the same in float64.

    Notes
    -----
    Of any k groups that have no token in common, the smallest of their largest logits is a lower bound of the k-th largest logit.
    So few tokens are left to choose from after two passes over the vocabulary.

    Examples
    --------
    >>> import numpy as np
    >>> from trt_kvcache.kernels.host.most_likely import most_likely
    >>> most_likely(np.array([1, 3, 2, 3, 2], np.float32), 3).tolist()
    [1, 2, 3]
    """
    if count >= logits.size:
        return np.arange(logits.size)
    if not count:
        return np.empty(0, np.intp)
    largest = np.float64(logits.max())
    candidates = _candidates(logits, count, largest)
    below = largest - logits[candidates].astype(np.float64)
    return candidates[_smallest(below, count)]


def _smallest(below: np.ndarray[Any, np.dtype[np.float64]], count: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Return the places of the ``count`` smallest numbers, in their order; of equal ones the first.

    Parameters
    ----------
    below : ndarray (n,) float64
        Without NaN.
    count : int
        From 1 to n.

    Returns
    -------
    ndarray (count,) intp
    """
    if count >= below.size:
        return np.arange(below.size)
    edge = np.partition(below, count - 1)[count - 1]
    kept = below < edge
    tied = np.flatnonzero(below == edge)
    kept[tied[: count - int(np.count_nonzero(kept))]] = True
    return np.flatnonzero(kept)


def _candidates(logits: np.ndarray[Any, np.dtype[np.float32]], count: int, largest: Any) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Return tokens, in the order of their ids, that contain the ``count`` most likely ones and all that are as likely as the last."""
    groups = max(_GROUPS_PER_TOKEN * count, _MIN_GROUPS)
    rows = logits.size // groups
    maxima = logits if rows < 2 else logits[: rows * groups].reshape(rows, groups).max(axis=0)
    place = maxima.size - count
    bound = np.float64(np.partition(maxima, place)[place])
    # Distances to the largest are rounded to 53 bits: a logit a little below the bound may be as likely as it.
    lowest = np.nextafter(np.float32(bound - (largest - bound) * 2.0**-51), np.float32(-np.inf))
    return np.flatnonzero(logits >= lowest)
