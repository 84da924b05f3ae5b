"""``TorchNorm``: RMSNorm or LayerNorm of a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from trt_kvcache.checkpoint.decoder_weights import NormWeights
from trt_kvcache.model import NormConfig


@dataclass(frozen=True, kw_only=True)
class TorchNorm:
    """RMSNorm or LayerNorm over the last axis. It is computed in float32 and rounded once, in either rounding order."""

    weight: torch.Tensor  # [n], as stored, in the dtype of the engine
    offset: float
    factor: torch.Tensor  # [n]: weight + offset in float32, or the weight itself without an offset
    epsilon: float  # added to the mean square
    centered: bool = False  # LayerNorm
    bias: torch.Tensor | None = None  # [n], of LayerNorm

    @classmethod
    def of(cls, config: NormConfig, stored: NormWeights[torch.Tensor]) -> TorchNorm:
        """Return the norm with stored weights."""
        weight = stored.weight
        factor = weight.float() + config.weight_offset if config.weight_offset else weight
        return cls(
            weight=weight,
            offset=config.weight_offset,
            factor=factor,
            epsilon=config.epsilon,
            centered=config.centered,
            bias=stored.bias,
        )

    @property
    def has_kernel(self) -> bool:
        """True if the kernels of this package compute it."""
        return not self.centered

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of ``x`` ``[..., n]``."""
        if self.centered:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)
        if x.dtype == self.factor.dtype:
            return F.rms_norm(x, self.factor.shape, self.factor, self.epsilon)
        return F.rms_norm(x.float(), self.factor.shape, self.factor, self.epsilon).to(x.dtype)
