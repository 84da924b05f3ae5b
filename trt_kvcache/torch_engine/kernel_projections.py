"""Matrix products of few rows by kernels of this package, on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from trt_kvcache.kernels.linear_kernels import GRANULE_NBYTES, INPUT_GRANULE, linear_gated_mul_kernel, linear_kernel
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.model import MlpConfig
from trt_kvcache.torch_engine.device_views import DeviceViews
from trt_kvcache.torch_engine.kernels import has_gate_kernel
from trt_kvcache.torch_engine.operations import Elementwise, Projections, TorchMatrix, TorchProjection, dense

#: Rows up to which the kernels are used: one tile of their products. ``benchmarks/linear.py`` compares them with torch.
MAX_KERNEL_ROWS = 8


class KernelProjections(Projections):
    """Products of a few rows by our kernels, of more by torch. No work in flight may write weights: the kernels prefetch them."""

    def __init__(self, elementwise: Elementwise, views: DeviceViews, stream: Any) -> None:
        super().__init__(elementwise)
        self._views, self._stream = views, stream

    def project(self, projection: TorchProjection, x: torch.Tensor) -> torch.Tensor:
        """See :meth:`Projections.project`."""
        weight = dense(projection.weight)
        if not _fits(x, weight):
            return super().project(projection, x)
        out = x.new_empty((*x.shape[:-1], len(weight)))
        linear_kernel(*self._tensors(x, weight, projection.bias, out), self._stream)
        return out

    def activated(self, inputs: TorchProjection, x: torch.Tensor, config: MlpConfig) -> torch.Tensor:
        """See :meth:`Projections.activated`."""
        weight = dense(inputs.weight)
        if not config.gated or not has_gate_kernel(config.activation) or not _fits(x, weight):
            return super().activated(inputs, x, config)
        out = x.new_empty((*x.shape[:-1], len(weight) // 2))
        linear_gated_mul_kernel(*self._tensors(x, weight, inputs.bias, out), config.activation, self._stream)
        return out

    def write_logits(self, rows: torch.Tensor, head: TorchMatrix, logits: torch.Tensor) -> None:
        """See :meth:`Projections.write_logits`."""
        weight = dense(head)
        if not _fits(rows, weight):
            super().write_logits(rows, head, logits)
            return
        linear_kernel(*self._tensors(rows, weight, None, logits), self._stream)

    def _tensors(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> tuple[DeviceTensor, DeviceTensor, DeviceTensor | None, DeviceTensor]:
        """Return rows, weight, bias and output of a product, as the kernels take them."""
        rows, matrix, results = map(self._views.of, (x.flatten(0, -2), weight, out.flatten(0, -2)))
        return rows, matrix, None if bias is None else self._views.of(bias), results


def _fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return True if the kernels support the product and these tensors."""
    if not 0 < x.numel() <= MAX_KERNEL_ROWS * x.shape[-1] or x.shape[-1] % INPUT_GRANULE:
        return False
    return all(tensor.is_contiguous() and tensor.data_ptr() % GRANULE_NBYTES == 0 for tensor in (x, weight))
