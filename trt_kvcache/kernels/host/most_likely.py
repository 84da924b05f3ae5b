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
        In the order of their ids. Of tokens with equal logits (0 and -0 are equal) those with the lowest ids.

    Notes
    -----
    Of any k groups that have no token in common, the smallest of their largest logits is a lower bound of the k-th largest logit.
    So few tokens are left to choose from after two passes over the vocabulary. Those that are as likely as the bound are counted, not
    ordered: with a grammar, or where many tokens are excluded, it is that of most of them.

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
    """Return a lower bound of the ``count``-th largest logit, which is one of them."""
    groups = max(_GROUPS_PER_TOKEN * count, _MIN_GROUPS)
    rows = logits.size // groups
    maxima = logits if rows < 2 else logits[: rows * groups].reshape(rows, groups).max(axis=0)
    place = maxima.size - count
    bound: np.float32 = np.partition(maxima, place)[place]
    return bound
