"""Matrix products with updates of adapters, of which each slot takes those of its own adapter."""

from __future__ import annotations

import torch

from trt_kvcache.model import MlpConfig
from trt_kvcache.torch_engine.adapter_updates import AdapterUpdate
from trt_kvcache.torch_engine.operations import Elementwise, Projections, TorchMatrix, TorchProjection


class AdaptedProjections(Projections):
    """Products of a step with adapters: those of ``others``, and updates after them. ``numbers`` int32 ``[A]``: adapters of the slots."""

    def __init__(self, others: Projections, elementwise: Elementwise, numbers: torch.Tensor) -> None:
        super().__init__(elementwise)
        self._others, self._numbers = others, numbers
        self._masks: dict[tuple[int, ...], torch.Tensor] = {}  # most layers have the same ranks

    def project(self, projection: TorchProjection, x: torch.Tensor) -> torch.Tensor:
        """See :meth:`Projections.project`."""
        if projection.update is None:
            return self._others.project(projection, x)
        return self._updated(projection, projection.update, x)

    def _updated(self, projection: TorchProjection, update: AdapterUpdate, x: torch.Tensor) -> torch.Tensor:
        out = self._others.project(projection, x)
        mask = self._masks.get(update.owners)
        if mask is None:
            mask = self._masks[update.owners] = update.others(self._numbers)
        update.add(out, x, mask)
        return out

    def activated(self, inputs: TorchProjection, x: torch.Tensor, config: MlpConfig) -> torch.Tensor:
        """See :meth:`Projections.activated`. An update must be added before the activation."""
        return self._others.activated(inputs, x, config) if inputs.update is None else super().activated(inputs, x, config)

    def write_logits(self, rows: torch.Tensor, head: TorchMatrix, logits: torch.Tensor) -> None:
        """See :meth:`Projections.write_logits`."""
        self._others.write_logits(rows, head, logits)
