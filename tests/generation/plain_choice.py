"""The definition of a sampled token, computed as it is written: the oracle of ``trt_kvcache.generation.token_choice``."""

from __future__ import annotations

import numpy as np


def plain_distribution(logits, *, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """The tokens that are kept, and their weights: probabilities times a common factor."""
    below = logits.max() - logits.astype(np.float64)
    tokens = np.arange(below.size)
    if 0 < top_k < below.size:
        tokens = np.sort(np.argsort(below, kind="stable")[:top_k])
    below = below[tokens]
    with np.errstate(over="ignore"):
        weights = np.exp(-below / temperature)
    if top_p < 1:
        order = np.argsort(below, kind="stable")
        kept = order[: int(np.searchsorted(np.cumsum(weights[order]), top_p * weights.sum())) + 1]
        tokens, weights = tokens[kept], weights[kept]
    likely = weights >= min_p
    return tokens[likely], weights[likely]


def plain_choice(logits, *, uniform, **options):
    """The token that a random number chooses."""
    tokens, weights = plain_distribution(logits, **options)
    sums = np.cumsum(weights)
    place = int(np.searchsorted(sums, uniform * sums[-1], side="right"))
    return int(tokens[min(place, len(tokens) - 1)])
