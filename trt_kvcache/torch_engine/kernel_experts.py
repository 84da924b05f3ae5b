"""Products of few rows with chosen experts by kernels of this package, on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from trt_kvcache.kernels.expert_kernels import (
    GATED_EPILOGUES,
    MAX_EXPERT_PAIRS,
    MAX_EXPERT_ROWS,
    PLAIN_EPILOGUES,
    Epilogue,
    ExpertWeights,
    expert_down_kernel,
    expert_up_kernel,
)
from trt_kvcache.kernels.linear_kernels import GRANULE_NBYTES, INPUT_GRANULE
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.model import ClampedSwiGLU, MlpConfig
from trt_kvcache.torch_engine.device_views import DeviceViews
from trt_kvcache.torch_engine.operations import Elementwise, ExpertProducts, Experts
from trt_kvcache.torch_engine.packed_stack import MatrixStack, PackedStack


class KernelExperts:
    """Products of a few rows by our kernels, of more by ``others``. No work in flight may write weights: the kernels prefetch them."""

    def __init__(self, others: ExpertProducts, elementwise: Elementwise, views: DeviceViews, stream: Any) -> None:
        self._others, self._elementwise, self._views, self._stream = others, elementwise, views, stream

    def __call__(self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, experts: Experts) -> torch.Tensor:
        """See :class:`ExpertProducts`."""
        if not _fits(rows, chosen, experts):
            return self._others(rows, chosen, weights, experts)
        choices, factors, view = chosen.int(), weights.contiguous(), self._views.of
        out = rows.new_empty((len(rows), experts.down.shape[1]))
        inner = self._inner(rows, choices, experts)
        down = matrices_of(experts.down, experts.down_bias, self._views)
        expert_down_kernel(view(inner), *down, view(choices), view(factors), view(out), self._stream)
        return out

    def _inner(self, rows: torch.Tensor, choices: torch.Tensor, experts: Experts) -> torch.Tensor:
        """Return the inner activations ``[n, k, intermediate]``."""
        config, weights = experts.config, matrices_of(experts.inputs, experts.inputs_bias, self._views)
        epilogue = epilogue_of(config)
        outputs = experts.inputs.shape[1] if epilogue == "linear" else experts.down.shape[2]
        results, view = rows.new_empty((*choices.shape, outputs)), self._views.of
        expert_up_kernel(view(rows), *weights, view(choices), view(results), epilogue, self._stream)
        if epilogue != "linear":
            return results
        return self._elementwise.inner(results, config)


def matrices_of(weight: MatrixStack, bias: torch.Tensor | None, views: DeviceViews) -> tuple[ExpertWeights, DeviceTensor | None]:
    """Return matrices and biases of experts as the kernels take them."""
    matrices = weight.tensors if isinstance(weight, PackedStack) else views.of(weight)
    return matrices, None if bias is None else views.of(bias)


def epilogue_of(config: MlpConfig) -> Epilogue:
    """Return the activation of an MLP as an epilogue of the kernels, or ``"linear"`` if it is none of theirs."""
    if isinstance(config.activation, ClampedSwiGLU):
        return config.activation
    epilogue = f"{config.activation}_mul" if config.gated else config.activation
    return epilogue if epilogue in (GATED_EPILOGUES if config.gated else PLAIN_EPILOGUES) else "linear"


def _fits(rows: torch.Tensor, chosen: torch.Tensor, experts: Experts) -> bool:
    """Return True if the kernels support these tensors."""
    if not 0 < len(rows) <= MAX_EXPERT_ROWS or chosen.numel() > MAX_EXPERT_PAIRS:
        return False
    if experts.is_packed:
        return bool(rows.is_contiguous())
    read = [rows, *(one for one in (experts.inputs, experts.down) if isinstance(one, torch.Tensor))]
    return all(one.is_contiguous() and one.shape[-1] % INPUT_GRANULE == 0 and one.data_ptr() % GRANULE_NBYTES == 0 for one in read)
