"""``Mlp``: a single MLP, as a part of a decoder layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trt_kvcache.model import MlpConfig
from trt_kvcache.torch_engine.fused_projections import fused, fused_before
from trt_kvcache.torch_engine.operations import Operations, TorchProjection
from trt_kvcache.torch_engine.stored_weights import StoredWeights


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """An MLP. ``inputs``: the rows of gate, if there is one, then of up."""

    config: MlpConfig
    inputs: TorchProjection
    down: TorchProjection

    @classmethod
    def of(cls, config: MlpConfig, stored: StoredWeights, prefix: str = "") -> Mlp:
        """Return the MLP with stored weights. ``prefix``: beginning of the names of its projections."""
        names = ("gate", "up") if config.gated else ("up",)
        inputs, down = fused_before(fused(stored, f"{prefix}down"), stored, *(f"{prefix}{name}" for name in names))
        return cls(config=config, inputs=inputs, down=down)

    def __call__(self, normed: torch.Tensor, operations: Operations) -> torch.Tensor:
        """Return the output."""
        projections, config = operations.projections, self.config
        if config.gate_multiplier == 1:
            return projections.project(self.down, projections.activated(self.inputs, normed, config))
        inputs = projections.project(self.inputs, normed)
        inputs[..., : config.intermediate_size].mul_(config.gate_multiplier)  # the kernels that activate a product have no factor
        return projections.project(self.down, operations.elementwise.inner(inputs, config))
