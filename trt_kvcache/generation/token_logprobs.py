"""Log-probabilities of tokens: the log-softmax of the logits as a model gave them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.kernels.host.most_likely import most_likely


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability of a token, and the most likely tokens at its place.

    Parameters
    ----------
    chosen : float
        Of the token that was chosen.
    top : tuple of (int, float)
        The most likely tokens and theirs, the most likely one first; of equally likely ones the lowest id first.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: npt.NDArray[np.float32], token: int, count: int) -> TokenLogprobs:
    """Return log-probabilities at one place.

    Parameters
    ----------
    logits : ndarray (vocab,) float32
        As the model gave them: before temperature, bias and penalties. On the host.
    token : int
        The chosen one.
    count : int
        How many of the most likely tokens to report; all at most.

    Returns
    -------
    TokenLogprobs
        Of the chosen token, and of the most likely ones.

    Examples
    --------
    >>> import numpy as np
    >>> from trt_kvcache.generation.token_logprobs import token_logprobs
    >>> found = token_logprobs(np.log(np.array([0.5, 0.2, 0.3], np.float32)), 1, 2)
    >>> round(found.chosen, 3), [(token, round(value, 3)) for token, value in found.top]
    (-1.609, [(0, -0.693), (2, -1.204)])
    """
    largest = logits.max()
    total = float(largest) + float(np.log(np.exp(logits - largest).sum(dtype=np.float64)))
    top: npt.NDArray[Any] = most_likely(logits, min(count, logits.size))
    top = top[np.argsort(-logits[top], kind="stable")]
    return TokenLogprobs(float(logits[token]) - total, tuple((int(one), float(logits[one]) - total) for one in top))
