"""Log-probabilities of tokens: the log-softmax of logits."""

from typing import Any

import numpy as np

from trt_kvcache.kernels.host.most_likely import most_likely


def log_probabilities(
    logits: np.ndarray[Any, np.dtype[np.float32]], token: int, count: int
) -> tuple[float, np.ndarray[Any, np.dtype[np.intp]], np.ndarray[Any, np.dtype[np.float64]]]:
    """Return the log-probability of a token, and the most likely tokens with theirs."""
    largest = logits.max()
    with np.errstate(invalid="ignore"):
        total = float(largest) + float(np.log(np.exp(logits - largest).sum(dtype=np.float64)))
    top: np.ndarray[Any, Any] = most_likely(logits, min(count, logits.size))
    top = top[np.argsort(-logits[top], kind="stable")]
    return float(logits[token]) - total, top, logits[top].astype(np.float64) - total
