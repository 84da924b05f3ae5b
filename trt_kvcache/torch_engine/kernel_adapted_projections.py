"""Matrix products with updates of adapters, by kernels of this package for a few rows."""

from __future__ import annotations

from typing import Any

import torch

from trt_kvcache.kernels.adapter_kernels import UpdateTensors, adapter_outputs_kernel, adapter_ranks_kernel
from trt_kvcache.kernels.linear_kernels import GRANULE_NBYTES, INPUT_GRANULE
from trt_kvcache.torch_engine.adapted_projections import AdaptedProjections
from trt_kvcache.torch_engine.adapter_updates import AdapterUpdate
from trt_kvcache.torch_engine.device_views import DeviceViews
from trt_kvcache.torch_engine.operations import Elementwise, Projections, TorchProjection

#: Rows up to which the kernels are used. ``benchmarks/adapters.py`` measures steps with adapters.
MAX_ADAPTER_ROWS = 64


class KernelAdaptedProjections(AdaptedProjections):
    """Updates of a few rows by our kernels, of more by torch."""

    def __init__(self, others: Projections, elementwise: Elementwise, numbers: torch.Tensor, views: DeviceViews, stream: Any) -> None:
        super().__init__(others, elementwise, numbers)
        self._views, self._stream, self._number_view = views, stream, views.of(numbers)

    def _updated(self, projection: TorchProjection, update: AdapterUpdate, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        if len(rows) > MAX_ADAPTER_ROWS or x.shape[-1] % INPUT_GRANULE or not x.is_contiguous() or x.data_ptr() % GRANULE_NBYTES:
            return super()._updated(projection, update, x)
        of = self._views.of
        tensors = UpdateTensors(
            a=of(update.a),
            b=of(update.b),
            owners=of(update.owners_on_device),
            parts=of(update.parts),
            starts=of(update.starts),
            max_outputs=update.max_outputs,
        )
        ranks = rows.new_empty((len(rows), len(update.owners)), dtype=torch.float32)  # lives until both launches are enqueued
        # Before the product, which reads its weights meanwhile.
        adapter_ranks_kernel(tensors, of(rows), self._number_view, of(ranks), self._stream)
        out = self._others.project(projection, x)
        adapter_outputs_kernel(tensors, of(ranks), self._number_view, of(out.flatten(0, -2)), self._stream)
        return out
