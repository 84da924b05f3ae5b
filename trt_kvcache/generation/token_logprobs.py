"""Log-probabilities of tokens: the log-softmax of the logits as a model gave them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trt_kvcache.kernels.most_likely import log_probabilities


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability of a token, and the most likely tokens at its place."""

    chosen: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: npt.NDArray[np.float32], token: int, count: int) -> TokenLogprobs:
    """Return log-probabilities at one place."""
    chosen, top, values = log_probabilities(logits, token, count)
    return TokenLogprobs(chosen, tuple(zip(top.tolist(), values.tolist(), strict=True)))
