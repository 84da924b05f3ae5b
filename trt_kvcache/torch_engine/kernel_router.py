"""The router of a routed MLP by kernels of this package, on a GPU, for few rows."""

from __future__ import annotations

from typing import Any

import torch

from trt_kvcache.kernels.router_kernels import (
    MAX_ROUTER_ROWS,
    choose_experts_kernel,
    router_is_supported,
    router_logits_kernel,
)
from trt_kvcache.model import RouterConfig
from trt_kvcache.torch_engine.device_views import DeviceViews
from trt_kvcache.torch_engine.operations import RouterWeights
from trt_kvcache.torch_engine.router import route


class KernelRouter:
    """Two launches for the routers and rows that the kernels support, else operations of torch."""

    def __init__(self, views: DeviceViews, stream: Any) -> None:
        self._views, self._stream = views, stream

    def __call__(self, router: RouterConfig, weights: RouterWeights, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~trt_kvcache.torch_engine.operations.Router`."""
        dtype = str(rows.dtype).removeprefix("torch.")
        if not 0 < len(rows) <= MAX_ROUTER_ROWS or not rows.is_contiguous() or not router_is_supported(router, rows.shape[1], dtype):
            return route(router, weights, rows)
        view, choices = self._views.of, (len(rows), router.experts_per_token)
        logits = rows.new_empty((len(rows), router.num_experts), dtype=torch.float32)
        chosen, factors = rows.new_empty(choices, dtype=torch.int32), rows.new_empty(choices, dtype=torch.float32)
        optional = (weights.bias, weights.choice_bias, weights.expert_scale)
        bias, choice_bias, expert_scale = (None if one is None else view(one) for one in optional)
        router_logits_kernel(view(rows), view(weights.weight), bias, view(logits), self._stream)
        choose_experts_kernel(view(logits), choice_bias, expert_scale, view(chosen), view(factors), router, self._stream)
        return chosen, factors
