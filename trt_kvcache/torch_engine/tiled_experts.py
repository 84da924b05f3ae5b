"""Products of the rows of a prompt with chosen experts by kernels of this package, on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from trt_kvcache.kernels.attention_tiles import ELEMENT_TYPES
from trt_kvcache.kernels.expert_order_kernels import (
    ROW_TILE_WIDTH,
    SUM_GRANULE,
    count_row_tiles,
    sort_by_expert_kernel,
    weighted_sums_kernel,
)
from trt_kvcache.kernels.expert_tile_kernels import expert_tiles_down_kernel, expert_tiles_up_kernel
from trt_kvcache.kernels.linear_kernels import GRANULE_NBYTES, INPUT_GRANULE
from trt_kvcache.torch_engine.device_views import DeviceViews
from trt_kvcache.torch_engine.grouped_experts import fits_grouped_mm
from trt_kvcache.torch_engine.kernel_experts import epilogue_of, matrices_of
from trt_kvcache.torch_engine.operations import Elementwise, ExpertProducts, Experts
from trt_kvcache.torch_engine.packed_stack import MatrixStack, PackedStack

#: Rows that are sorted and multiplied at once: blocks along y of the sums.
_MAX_ROWS = 65535

#: Rows of an expert, on average, up to which our kernels multiply 16 bits faster than torch: see ``benchmarks/expert_prompts.py``.
_MOST_PAIRS = 32


class TiledExperts:
    """Products of many rows, sorted by expert on the device, so the host does not wait. ``others`` have what the kernels do not take.

    ``others`` also multiply many rows in 16 bits, for which ``grouped_mm`` is faster.
    """

    def __init__(self, others: ExpertProducts, elementwise: Elementwise, views: DeviceViews, stream: Any) -> None:
        self._others, self._elementwise, self._views, self._stream = others, elementwise, views, stream

    def __call__(self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, experts: Experts) -> torch.Tensor:
        """See :class:`ExpertProducts`."""
        if not fits_tiles(experts) or not len(rows) or is_for_grouped_mm(experts, chosen.numel()):
            return self._others(rows, chosen, weights, experts)
        out = rows.new_empty((len(rows), experts.down.shape[1]))
        for first in range(0, len(rows), _MAX_ROWS):
            some = slice(first, first + _MAX_ROWS)
            self._write(rows[some], chosen[some], weights[some], out[some], experts)
        return out

    def _write(self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, experts: Experts) -> None:
        rows, choices, factors = rows.contiguous(), chosen.int(), weights.contiguous()
        view, pairs, stream = self._views.of, chosen.numel(), self._stream
        order = torch.empty(pairs, dtype=torch.int32, device=rows.device)
        row_tiles = order.new_empty((count_row_tiles(pairs, len(experts.inputs)), ROW_TILE_WIDTH))
        sort_by_expert_kernel(view(choices), view(order), view(row_tiles), len(experts.inputs), stream)
        epilogue = epilogue_of(experts.config)
        inner = rows.new_empty((pairs, experts.inputs.shape[1] if epilogue == "linear" else experts.down.shape[2]))
        of_inputs, of_down = (
            matrices_of(*one, self._views) for one in ((experts.inputs, experts.inputs_bias), (experts.down, experts.down_bias))
        )
        expert_tiles_up_kernel(view(rows), *of_inputs, view(order), view(row_tiles), view(inner), epilogue, stream)
        if epilogue == "linear":
            inner = self._elementwise.inner(inner[None], experts.config)[0]
        products = rows.new_empty((pairs, experts.down.shape[1]))
        expert_tiles_down_kernel(view(inner), *of_down, view(order), view(row_tiles), view(products), stream)
        weighted_sums_kernel(view(products.view(*chosen.shape, -1)), view(factors), view(out), stream)


def fits_tiles(experts: Experts) -> bool:
    """Return True if the kernels for prompts take these experts."""
    return _fits(experts.inputs) and _fits(experts.down) and experts.down.shape[1] % SUM_GRANULE == 0


def is_for_grouped_mm(experts: Experts, pairs: int) -> bool:
    """Return True if products in 16 bits are faster with ``grouped_mm``, for which no host waits either."""
    return pairs > _MOST_PAIRS * len(experts.inputs) and fits_grouped_mm(experts)


def _fits(matrices: MatrixStack) -> bool:
    if isinstance(matrices, PackedStack):
        return True
    if str(matrices.dtype).removeprefix("torch.") not in ELEMENT_TYPES or not matrices.is_contiguous():
        return False
    return bool(matrices.shape[2] % INPUT_GRANULE == 0 and matrices.data_ptr() % GRANULE_NBYTES == 0)
