"""``ParameterCounts``: the parameters of a model, and those that the computation of one token uses."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trt_kvcache.model.mlp_config import RoutedMlpConfig
from trt_kvcache.model.model_config import ModelConfig
from trt_kvcache.model.tensor_shapes import tensor_shapes
from trt_kvcache.model.weight_parts import layer_parts, split_role


@dataclass(frozen=True, kw_only=True)
class ParameterCounts:
    """Number of parameters: in total, and active ones, without the experts that a token does not choose. The embedding counts in both."""

    total: int
    active: int

    @classmethod
    def of(cls, config: ModelConfig) -> ParameterCounts:
        """Count the parameters of a model."""
        total = sum(map(math.prod, tensor_shapes(config).values()))
        return cls(total=total, active=total - sum(_idle(config, index) for index in range(config.num_layers)))


def _idle(config: ModelConfig, index: int) -> int:
    """Return the parameters of the experts of a layer that a token does not choose."""
    mlp = config.layers[index].mlp
    if not isinstance(mlp, RoutedMlpConfig):
        return 0
    of_one = sum(math.prod(part.shape) for role, part in layer_parts(config, index).items() if split_role(role)[1] == "0")
    return of_one * (mlp.router.num_experts - mlp.router.experts_per_token)
