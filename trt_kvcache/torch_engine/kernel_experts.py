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
from trt_kvcache.torch_engine.experts import MAX_FIXED_ROWS
from trt_kvcache.torch_engine.operations import Elementwise, ExpertProducts, Experts
from trt_kvcache.torch_engine.packed_stack import MatrixStack, PackedStack


class KernelExperts:
    """Products of a few rows by our kernels, of more by ``others``. No work in flight may write weights: the kernels prefetch them.

    Rows of packed experts are few as long as a step may be captured: several launches have up to 8 of them each.
    """

    def __init__(self, others: ExpertProducts, elementwise: Elementwise, views: DeviceViews, stream: Any) -> None:
        self._others, self._elementwise, self._views, self._stream = others, elementwise, views, stream

    def __call__(self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, experts: Experts) -> torch.Tensor:
        """See :class:`ExpertProducts`."""
        if not _fits(rows, chosen, experts):
            return self._others(rows, chosen, weights, experts)
        choices, factors = chosen.int(), weights.contiguous()
        out = rows.new_empty((len(rows), experts.down.shape[1]))
        step = min(MAX_EXPERT_ROWS, MAX_EXPERT_PAIRS // chosen.shape[1])
        down, view = self._matrices(experts.down, experts.down_bias), self._views.of
        for one in zip(rows.split(step), choices.split(step), factors.split(step), out.split(step), strict=True):
            some, of_rows, by, results = one
            inner = self._inner(some, of_rows, experts)
            expert_down_kernel(view(inner), *down, view(of_rows), view(by), view(results), self._stream)
        return out

    def _inner(self, rows: torch.Tensor, choices: torch.Tensor, experts: Experts) -> torch.Tensor:
        """Return the inner activations ``[n, k, intermediate]``."""
        config, weights = experts.config, self._matrices(experts.inputs, experts.inputs_bias)
        epilogue = epilogue_of(config)
        outputs = experts.inputs.shape[1] if epilogue == "linear" else experts.down.shape[2]
        results, view = rows.new_empty((*choices.shape, outputs)), self._views.of
        expert_up_kernel(view(rows), *weights, view(choices), view(results), epilogue, self._stream)
        if epilogue != "linear":
            return results
        return self._elementwise.inner(results, config)

    def _matrices(self, weight: MatrixStack, bias: torch.Tensor | None) -> tuple[ExpertWeights, DeviceTensor | None]:
        matrices = weight.tensors if isinstance(weight, PackedStack) else self._views.of(weight)
        return matrices, None if bias is None else self._views.of(bias)


def epilogue_of(config: MlpConfig) -> Epilogue:
    """Return the activation of an MLP as an epilogue of the kernels, or ``"linear"`` if it is none of theirs."""
    if isinstance(config.activation, ClampedSwiGLU):
        return config.activation
    epilogue = f"{config.activation}_mul" if config.gated else config.activation
    return epilogue if epilogue in (GATED_EPILOGUES if config.gated else PLAIN_EPILOGUES) else "linear"


def _fits(rows: torch.Tensor, chosen: torch.Tensor, experts: Experts) -> bool:
    """Return True if the kernels support these tensors."""
    if experts.is_packed:
        return 0 < len(rows) <= MAX_FIXED_ROWS and chosen.shape[1] <= MAX_EXPERT_PAIRS and rows.is_contiguous()
    if not 0 < len(rows) <= MAX_EXPERT_ROWS or chosen.numel() > MAX_EXPERT_PAIRS:
        return False
    read = [rows, *(one for one in (experts.inputs, experts.down) if isinstance(one, torch.Tensor))]
    return all(one.is_contiguous() and one.shape[-1] % INPUT_GRANULE == 0 and one.data_ptr() % GRANULE_NBYTES == 0 for one in read)
