"""Products of many rows with chosen experts in 16 bits, those of all experts in one launch, on a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from trt_kvcache.torch_engine.experts import weighted_sums
from trt_kvcache.torch_engine.operations import Elementwise, ExpertProducts, Experts
from trt_kvcache.torch_engine.packed_stack import MatrixStack

#: Elements that rows of its operands are a multiple of: 16 bytes.
GROUPED_MM_GRANULE = 8


class GroupedProducts:
    """Products of rows, sorted by expert, with ``torch.nn.functional.grouped_mm``; what that does not take is left to ``others``."""

    def __init__(self, others: ExpertProducts, elementwise: Elementwise) -> None:
        self._others, self._elementwise = others, elementwise

    def __call__(self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, experts: Experts) -> torch.Tensor:
        """See :class:`ExpertProducts`."""
        if not fits_grouped_mm(experts):
            return self._others(rows, chosen, weights, experts)
        count = chosen.shape[1]
        of_rows, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(of_rows, torch.arange(len(experts.inputs), device=rows.device), right=True, out_int32=True)
        inner = _product(rows[order // count], of_rows, ends, experts.inputs, experts.inputs_bias)
        inner = self._elementwise.inner(inner[None], experts.config)[0]
        products = _product(inner, of_rows, ends, experts.down, experts.down_bias)
        results = torch.empty_like(products)
        results[order] = products
        return weighted_sums(results.view(*chosen.shape, -1), weights)


def fits_grouped_mm(experts: Experts) -> bool:
    """Return True if this torch has grouped products, from 2.10 on, and they take these experts."""
    return hasattr(F, "grouped_mm") and _fits(experts.inputs) and _fits(experts.down)


def _fits(matrices: MatrixStack) -> bool:
    return isinstance(matrices, torch.Tensor) and all(size % GROUPED_MM_GRANULE == 0 for size in matrices.shape[1:])


def _product(
    rows: torch.Tensor, of_rows: torch.Tensor, ends: torch.Tensor, matrices: MatrixStack, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return the products of sorted rows. ``of_rows``: their experts; ``ends``: behind the last row of each expert."""
    assert isinstance(matrices, torch.Tensor)
    out = F.grouped_mm(rows, matrices.mT, offs=ends)
    return out if bias is None else out.add_(bias[of_rows])
