"""Products of many rows with chosen experts, those of many experts in one launch, on a GPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from trt_kvcache.kernels.packed_linear_kernels import packed_dequantize_kernel
from trt_kvcache.torch_engine.device_views import DeviceViews
from trt_kvcache.torch_engine.experts import weighted_sums
from trt_kvcache.torch_engine.operations import Elementwise, ExpertProducts, Experts
from trt_kvcache.torch_engine.packed_stack import MatrixStack, PackedStack

#: Elements that rows of its operands are a multiple of: 16 bytes.
GROUPED_MM_GRANULE = 8


class GroupedProducts:
    """Products of rows, sorted by expert, with ``torch.nn.functional.grouped_mm``; what that does not take is left to ``others``.

    Packed matrices are dequantized into ``workspace``, as many experts at a time as it holds; the host then waits for the numbers of rows.
    """

    def __init__(
        self, others: ExpertProducts, elementwise: Elementwise, workspace: torch.Tensor | None, views: DeviceViews, stream: Any
    ) -> None:
        self._others, self._elementwise, self._workspace = others, elementwise, workspace
        self._views, self._stream = views, stream

    def __call__(self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, experts: Experts) -> torch.Tensor:
        """See :class:`ExpertProducts`."""
        if not (has_grouped_mm() and self._fits(experts.inputs) and self._fits(experts.down)):
            return self._others(rows, chosen, weights, experts)
        count = chosen.shape[1]
        of_rows, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(of_rows, torch.arange(len(experts.inputs), device=rows.device), right=True, out_int32=True)
        known_ends = ends.tolist() if experts.is_packed else []
        inner = self._product(rows[order // count], of_rows, ends, known_ends, experts.inputs, experts.inputs_bias)
        inner = self._elementwise.inner(inner[None], experts.config)[0]
        products = self._product(inner, of_rows, ends, known_ends, experts.down, experts.down_bias)
        results = torch.empty_like(products)
        results[order] = products
        return weighted_sums(results.view(*chosen.shape, -1), weights)

    def _fits(self, matrices: MatrixStack) -> bool:
        _, outputs, inputs = matrices.shape
        if outputs % GROUPED_MM_GRANULE or inputs % GROUPED_MM_GRANULE:
            return False
        return isinstance(matrices, torch.Tensor) or (self._workspace is not None and outputs * inputs <= self._workspace.numel())

    def _product(
        self,
        rows: torch.Tensor,
        of_rows: torch.Tensor,
        ends: torch.Tensor,
        known_ends: list[int],
        matrices: MatrixStack,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the products of sorted rows. ``of_rows``: their experts; ``ends``: behind the last row of each expert."""
        if isinstance(matrices, PackedStack):
            out = self._packed_product(rows, ends, known_ends, matrices)
        else:
            out = F.grouped_mm(rows, matrices.mT, offs=ends)
        return out if bias is None else out.add_(bias[of_rows])

    def _packed_product(self, rows: torch.Tensor, ends: torch.Tensor, known_ends: list[int], stack: PackedStack) -> torch.Tensor:
        assert self._workspace is not None
        count, outputs, inputs = stack.shape
        out = rows.new_empty((len(rows), outputs))
        step, begin = self._workspace.numel() // (outputs * inputs), 0
        for first in range(0, count, step):
            last = min(first + step, count)
            end = known_ends[last - 1]
            if begin < end:
                weights = self._workspace[: (last - first) * outputs * inputs].view(-1, inputs)
                packed_dequantize_kernel(self._views.of(weights), stack.whole.tensors, first * outputs, self._stream)
                some = F.grouped_mm(rows[begin:end], weights.view(-1, outputs, inputs).mT, offs=ends[first:last] - begin)
                out[begin:end] = some
            begin = end
        return out


def has_grouped_mm() -> bool:
    """Return True if this torch has grouped products: from 2.10 on."""
    return hasattr(F, "grouped_mm")
