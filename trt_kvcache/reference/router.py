"""The router of the reference engine: the experts of each token, and their weights."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trt_kvcache.model import RouterConfig
from trt_kvcache.reference.activations import sigmoid
from trt_kvcache.reference.attention import softmax
from trt_kvcache.reference.weights import Float32


def route(
    router: RouterConfig, logits: Float32, choice_bias: Float32 | None, expert_scale: Float32 | None = None
) -> tuple[npt.NDArray[np.int64], Float32]:
    """Return the experts of each token and their weights, both ``[n, experts_per_token]``, from the router's logits ``[n, num_experts]``.

    Of equal scores, the expert with the lower number is chosen.
    """
    scores = softmax(logits) if router.scores == "softmax" else sigmoid(logits)
    chosen_by = scores if choice_bias is None else scores + choice_bias
    if router.num_groups > 1:
        chosen_by = _without_other_groups(router, chosen_by)
    experts = _highest(chosen_by, router.experts_per_token)
    weights: Float32 = np.take_along_axis(scores, experts, axis=1)
    if router.renormalise:
        weights = weights / (weights.sum(axis=1, keepdims=True) + np.float32(router.sum_epsilon))
    weights = weights * np.float32(router.factor)
    return experts, weights if expert_scale is None else weights * expert_scale[experts]


def _without_other_groups(router: RouterConfig, scores: Float32) -> Float32:
    """Return the scores with -inf for experts outside of the chosen groups."""
    groups = scores.reshape(len(scores), router.num_groups, router.group_size)
    sums = np.sort(groups, axis=2)[:, :, -2:].sum(axis=2)
    is_chosen = np.zeros(sums.shape, bool)
    np.put_along_axis(is_chosen, _highest(sums, router.groups_per_token), True, axis=1)
    kept: Float32 = np.where(is_chosen[:, :, None], groups, np.float32(-np.inf)).reshape(scores.shape)
    return kept


def _highest(scores: Float32, count: int) -> npt.NDArray[np.int64]:
    """Return the columns of the highest scores of each row, ``[n, count]``, from the highest one on."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :count]
