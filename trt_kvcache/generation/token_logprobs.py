"""Log-probabilities of tokens: the log-softmax of the model's own logits."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trt_kvcache.kernels.most_likely import log_probabilities


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of the chosen token, and of the most likely tokens: by descending probability, ties by ascending id."""

    chosen: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: npt.NDArray[np.float32], token: int, count: int) -> TokenLogprobs:
    """Return log-probabilities of ``token`` and of the ``count`` most likely tokens for logits ``(vocab,)`` on the host."""
    chosen, top, values = log_probabilities(logits, token, count)
    return TokenLogprobs(chosen, tuple(zip(top.tolist(), values.tolist(), strict=True)))
