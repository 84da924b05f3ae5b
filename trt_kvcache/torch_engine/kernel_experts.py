"""Products of few rows with chosen experts by kernels of this package, on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from trt_kvcache.kernels.expert_kernels import (
    GATED_EXPERT_ACTIVATIONS,
    MAX_EXPERT_PAIRS,
    MAX_EXPERT_ROWS,
    PLAIN_EXPERT_ACTIVATIONS,
    expert_down_kernel,
    expert_up_kernel,
)
from trt_kvcache.kernels.linear_kernels import GRANULE_NBYTES, INPUT_GRANULE
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.torch_engine.device_views import DeviceViews
from trt_kvcache.torch_engine.operations import ExpertProducts, Experts


class KernelExperts:
    """Products of a few rows by our kernels, of more by ``others``. No work in flight may write weights: the kernels prefetch them."""

    def __init__(self, others: ExpertProducts, views: DeviceViews, stream: Any) -> None:
        self._others, self._views, self._stream = others, views, stream

    def __call__(self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, experts: Experts) -> torch.Tensor:
        """See :class:`ExpertProducts`."""
        activation = experts.config.activation
        if not isinstance(activation, str) or not _fits(rows, chosen, experts):
            return self._others(rows, chosen, weights, experts)
        choices, factors = chosen.int(), weights.contiguous()
        inner, out = rows.new_empty((*chosen.shape, experts.down.shape[2])), rows.new_empty((len(rows), experts.down.shape[1]))
        up, down = (self._matrices(*pair) for pair in ((experts.inputs, experts.inputs_bias), (experts.down, experts.down_bias)))
        view = self._views.of
        expert_up_kernel(view(rows), *up, view(choices), view(inner), activation, self._stream)
        expert_down_kernel(view(inner), *down, view(choices), view(factors), view(out), self._stream)
        return out

    def _matrices(self, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[DeviceTensor, DeviceTensor | None]:
        return self._views.of(weight), None if bias is None else self._views.of(bias)


def _fits(rows: torch.Tensor, chosen: torch.Tensor, experts: Experts) -> bool:
    """Return True if the kernels support the products and these tensors."""
    activations = GATED_EXPERT_ACTIVATIONS if experts.config.gated else PLAIN_EXPERT_ACTIVATIONS
    if experts.config.activation not in activations:
        return False
    if not 0 < len(rows) <= MAX_EXPERT_ROWS or chosen.numel() > MAX_EXPERT_PAIRS:
        return False
    read = (rows, experts.inputs, experts.down)
    return all(one.is_contiguous() and one.shape[-1] % INPUT_GRANULE == 0 and one.data_ptr() % GRANULE_NBYTES == 0 for one in read)
