"""``TorchNorm``: RMSNorm of a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from trt_kvcache.model import NormConfig


@dataclass(frozen=True, kw_only=True)
class TorchNorm:
    """RMSNorm over the last axis. Quotient and product are computed in float32 and rounded once, whichever a model rounds first."""

    weight: torch.Tensor
    offset: float
    factor: torch.Tensor
    epsilon: float

    @classmethod
    def of(cls, config: NormConfig, weight: torch.Tensor) -> TorchNorm:
        """Return the norm with a stored weight."""
        factor = weight.float() + config.weight_offset if config.weight_offset else weight
        return cls(weight=weight, offset=config.weight_offset, factor=factor, epsilon=config.epsilon)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of ``x`` ``[..., n]``."""
        if x.dtype == self.factor.dtype:
            return F.rms_norm(x, self.factor.shape, self.factor, self.epsilon)
        return F.rms_norm(x.float(), self.factor.shape, self.factor, self.epsilon).to(x.dtype)
