"""The router of a routed MLP: the experts of each row, and their weights, by operations of fixed shapes.

Shapes: n rows, k experts of each, E experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from trt_kvcache.model import RouterConfig
from trt_kvcache.torch_engine.operations import RouterWeights


def route(router: RouterConfig, weights: RouterWeights, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See :class:`~trt_kvcache.torch_engine.operations.Router`; experts are int64."""
    return chosen(router, F.linear(rows.float(), weights.weight, weights.bias), weights.choice_bias, weights.expert_scale)


def chosen(
    router: RouterConfig, logits: torch.Tensor, choice_bias: torch.Tensor | None, expert_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts and their weights, see :func:`route`, from logits float32 ``[n, E]``.

    Of equal scores, the expert with the lower number is chosen, as in the reference engine.
    """
    scores = logits.softmax(dim=1) if router.scores == "softmax" else logits.sigmoid()
    chosen_by = scores if choice_bias is None else scores + choice_bias
    if router.num_groups > 1:
        chosen_by = _without_other_groups(router, chosen_by)
    experts = _highest(chosen_by, router.experts_per_token)
    weights = scores.gather(1, experts)
    if router.renormalise:
        weights = weights / (weights.sum(dim=1, keepdim=True) + router.sum_epsilon)
    weights = weights if router.factor == 1 else weights * router.factor
    return experts, weights if expert_scale is None else weights * expert_scale[experts]


def _without_other_groups(router: RouterConfig, scores: torch.Tensor) -> torch.Tensor:
    """Return the scores with -inf for experts outside of the chosen groups."""
    groups = scores.unflatten(1, (router.num_groups, router.group_size))
    sums = groups.topk(2, dim=2).values.sum(dim=2)
    is_other = torch.ones_like(sums, dtype=torch.bool).scatter_(1, _highest(sums, router.groups_per_token), False)
    return groups.masked_fill(is_other[:, :, None], -torch.inf).flatten(1)


def _highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the columns of the highest scores of each row, from the highest one on."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
