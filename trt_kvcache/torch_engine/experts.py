"""Products of rows with the experts that a router has chosen for them.

Shapes: n rows, k experts of each, E experts.
"""

from __future__ import annotations

import torch

from trt_kvcache.torch_engine.operations import Elementwise, ExpertProducts, Experts, Projections
from trt_kvcache.torch_engine.packed_stack import PackedStack

#: Rows up to which products have fixed shapes on a GPU, so that a step can be captured. All experts together then take the time to read
#: their weights, not to multiply them.
MAX_FIXED_ROWS = 64

#: Reads and writes of a weight that is gathered before it is multiplied, which reads it once more.
_GATHER_ACCESSES = 3


class SortedProducts:
    """Products of any number of rows, sorted by expert: each chosen expert is read once, the others are not.

    The host waits for the number of rows of each expert.
    """

    def __init__(self, projections: Projections) -> None:
        self._projections = projections

    def __call__(self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, experts: Experts) -> torch.Tensor:
        """See :class:`ExpertProducts`."""
        count = chosen.shape[1]
        order = chosen.flatten().argsort(stable=True)
        sorted_rows = rows[order // count][None]  # as one slot: [1, n * k, hidden]
        results = torch.empty_like(sorted_rows)
        first = 0
        for expert, size in enumerate(chosen.flatten().bincount(minlength=len(experts.inputs)).tolist()):
            if size:
                inputs, down = experts.of(expert)
                some = slice(first, first + size)
                inner = self._projections.activated(inputs, sorted_rows[:, some], experts.config)
                results[:, order[some]] = self._projections.project(down, inner)
                first += size
        return weighted_sums(results.view(len(rows), count, -1), weights)


class FixedProducts:
    """Products of few rows by operations of fixed shapes, for which no host waits. ``many`` has more rows, and packed weights.

    The weights of the chosen experts are gathered, or all experts are multiplied if that reads and writes less.
    """

    def __init__(self, many: ExpertProducts, elementwise: Elementwise) -> None:
        self._many, self._elementwise = many, elementwise

    def __call__(self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, experts: Experts) -> torch.Tensor:
        """See :class:`ExpertProducts`."""
        if len(rows) > MAX_FIXED_ROWS or isinstance(experts.inputs, PackedStack) or isinstance(experts.down, PackedStack):
            return self._many(rows, chosen, weights, experts)
        if _GATHER_ACCESSES * chosen.numel() <= len(experts.inputs):
            return weighted_sums(self._gathered(rows, chosen, experts, experts.inputs, experts.down), weights)
        return weighted_sums(self._of_all(rows, chosen, experts, experts.inputs, experts.down), weights)

    def _gathered(
        self, rows: torch.Tensor, chosen: torch.Tensor, experts: Experts, inputs: torch.Tensor, down: torch.Tensor
    ) -> torch.Tensor:
        indices = chosen.flatten()

        def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            out = torch.bmm(x, weight[indices].mT)
            return out if bias is None else out + bias[indices, None]

        repeated = rows[:, None].expand(-1, chosen.shape[1], -1).flatten(0, 1)[:, None]
        inner = self._elementwise.inner(product(repeated, inputs, experts.inputs_bias), experts.config)
        return product(inner, down, experts.down_bias).view(*chosen.shape, -1)

    def _of_all(self, rows: torch.Tensor, chosen: torch.Tensor, experts: Experts, inputs: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            out = torch.bmm(x, weight.mT)
            return out if bias is None else out + bias[:, None]

        repeated = rows.expand(len(inputs), -1, -1)
        inner = self._elementwise.inner(product(repeated, inputs, experts.inputs_bias), experts.config)
        out = product(inner, down, experts.down_bias)
        return out[chosen, torch.arange(len(rows), device=rows.device)[:, None]]


def weighted_sums(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the sums of the outputs ``[n, k, hidden]`` of a row's experts, times their weights."""
    return (outputs.float() * weights[:, :, None]).sum(dim=1).to(outputs.dtype)
