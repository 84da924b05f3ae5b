"""Matrix products with packed weights, on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from trt_kvcache.kernels.attention_tiles import ELEMENT_TYPES, MIN_ARCH, arch_number
from trt_kvcache.kernels.column_order_kernels import gather_columns_kernel
from trt_kvcache.kernels.linear_tiles import ROW_COUNTS
from trt_kvcache.kernels.packed_layout import FRAGMENT_OUTPUTS
from trt_kvcache.kernels.packed_linear_kernels import packed_dequantize_kernel, packed_linear_gated_mul_kernel, packed_linear_kernel
from trt_kvcache.kernels.packed_pair_kernels import packed_linear_pair_kernel
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.model import MlpConfig
from trt_kvcache.torch_engine.device_views import DeviceViews
from trt_kvcache.torch_engine.kernels import has_gate_kernel
from trt_kvcache.torch_engine.operations import Elementwise, Projections, TorchMatrix, TorchProjection, write_product
from trt_kvcache.torch_engine.packed_matrix import PackedMatrix, PackedParts

#: Rows of a launch, and rows up to which weights are read packed by several launches: more are multiplied with dequantized weights.
LAUNCH_ROWS, MAX_PACKED_ROWS = ROW_COUNTS[-1], 4 * ROW_COUNTS[-1]

#: Weights that are dequantized at a time, at most: of 16 bits, 64 MiB.
WORKSPACE_WEIGHTS = 1 << 25


class PackedProjections(Projections):
    """Products with packed weights: of few rows by our kernels, of more by torch, in parts that a kernel dequantizes into ``workspace``.

    Other weights are left to ``others``. No work in flight may write weights: the kernels prefetch them.
    """

    def __init__(self, others: Projections, elementwise: Elementwise, workspace: torch.Tensor, views: DeviceViews, stream: Any) -> None:
        super().__init__(elementwise)
        self._others, self._workspace, self._views, self._stream = others, workspace, views, stream

    def project(self, projection: TorchProjection, x: torch.Tensor) -> torch.Tensor:
        """See :meth:`Projections.project`."""
        if isinstance(projection.weight, torch.Tensor):
            return self._others.project(projection, x)
        out = x.new_empty((*x.shape[:-1], projection.weight.outputs))
        rows, results = x.flatten(0, -2), out.flatten(0, -2)
        if isinstance(projection.weight, PackedParts):
            self._write_parts(rows, projection.weight, projection.bias, results)
        else:
            self._write(rows, projection.weight, projection.bias, results)
        return out

    def activated(self, inputs: TorchProjection, x: torch.Tensor, config: MlpConfig) -> torch.Tensor:
        """See :meth:`Projections.activated`."""
        weight, rows = inputs.weight, x.flatten(0, -2)
        if isinstance(weight, torch.Tensor):
            return self._others.activated(inputs, x, config)
        if isinstance(weight, PackedParts) or not config.gated or not has_gate_kernel(config.activation) or len(rows) > MAX_PACKED_ROWS:
            return super().activated(inputs, x, config)
        out = x.new_empty((*x.shape[:-1], weight.outputs // 2))
        bias = self._view(inputs.bias)
        for some, results in _launches(self._in_order(rows, weight), out.flatten(0, -2)):
            packed_linear_gated_mul_kernel(
                self._views.of(some), weight.tensors, bias, self._views.of(results), config.activation, self._stream
            )
        return out

    def write_logits(self, rows: torch.Tensor, head: TorchMatrix, logits: torch.Tensor) -> None:
        """See :meth:`Projections.write_logits`."""
        if isinstance(head, PackedMatrix):
            self._write(rows, head, None, logits)
        else:
            self._others.write_logits(rows, head, logits)

    def _write_parts(self, rows: torch.Tensor, weight: PackedParts, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Write the products of ``rows`` ``[n, in]`` with all parts into columns of ``out`` ``[n, out]``."""
        first = 0
        for parts in weight.launches if len(rows) <= MAX_PACKED_ROWS else ((part,) for part in weight.parts):
            columns = slice(first, first + sum(part.outputs for part in parts))
            of_parts = None if bias is None else bias[columns]
            if len(parts) == 2:
                self._write_pair(rows, parts, of_parts, out[:, columns])
            else:
                self._write(rows, parts[0], of_parts, out[:, columns])
            first = columns.stop

    def _write_pair(
        self, rows: torch.Tensor, pair: tuple[PackedMatrix, PackedMatrix], bias: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        first, second = pair
        for some, results in _launches(rows, out):
            packed_linear_pair_kernel(
                self._views.of(some), (first.tensors, second.tensors), self._view(bias), self._views.of(results), self._stream
            )

    def _write(self, rows: torch.Tensor, weight: PackedMatrix, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Write the product of ``rows`` ``[n, in]`` into ``out`` ``[n, out]``, which may be columns of a wider tensor."""
        rows = self._in_order(rows, weight)
        if len(rows) > MAX_PACKED_ROWS:
            self._write_many(rows, weight, bias, out)
            return
        for some, results in _launches(rows, out):
            packed_linear_kernel(self._views.of(some), weight.tensors, self._view(bias), self._views.of(results), self._stream)

    def _write_many(self, rows: torch.Tensor, weight: PackedMatrix, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        step = max(self._workspace.numel() // weight.inputs // FRAGMENT_OUTPUTS, 1) * FRAGMENT_OUTPUTS
        for first in range(0, weight.outputs, step):
            outputs = slice(first, min(first + step, weight.outputs))
            count = outputs.stop - first
            weights = self._workspace[: count * weight.inputs].view(count, weight.inputs)
            packed_dequantize_kernel(self._views.of(weights), weight.tensors, first, self._stream)
            if bias is None:
                write_product(rows, weights, out[:, outputs])
            else:
                torch.addmm(bias[outputs], rows, weights.t(), out=out[:, outputs])

    def _in_order(self, rows: torch.Tensor, weight: PackedMatrix) -> torch.Tensor:
        """Return rows with their columns in the order of the weight's inputs."""
        if weight.order is None or not len(rows):
            return rows
        rows = rows.contiguous()
        ordered = torch.empty_like(rows)
        gather_columns_kernel(self._views.of(rows), self._views.of(weight.order), self._views.of(ordered), self._stream)
        return ordered

    def _view(self, bias: torch.Tensor | None) -> DeviceTensor | None:
        return None if bias is None else self._views.of(bias)


def packed_weights_are_supported(dtype: str, memory: Memory) -> bool:
    """Return True if the kernels for packed weights support the dtype and the GPU."""
    return not memory.is_host and dtype in ELEMENT_TYPES and arch_number(memory.arch) >= MIN_ARCH  # type: ignore[attr-defined]


def new_workspace(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a workspace of :class:`PackedProjections`. Steps that share one are ordered on one stream."""
    return torch.empty(WORKSPACE_WEIGHTS, dtype=dtype, device=device)


def _launches(rows: torch.Tensor, out: torch.Tensor) -> zip[tuple[torch.Tensor, torch.Tensor]]:
    """Return the rows and the outputs of each launch."""
    return zip(rows.contiguous().split(LAUNCH_ROWS), out.split(LAUNCH_ROWS), strict=True)
