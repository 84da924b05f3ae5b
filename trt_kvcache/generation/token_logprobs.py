"""Log-probabilities of tokens: the log-softmax of the logits as a model gave them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trt_kvcache.kernels.host.log_probabilities import log_probabilities


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
    chosen, top, values = log_probabilities(logits, token, count)
    return TokenLogprobs(chosen, tuple(zip(top.tolist(), values.tolist(), strict=True)))
