"""``ExpertWeights``: the weights of router and experts of a layer, as the inputs of their operation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from trt_kvcache.builder.network.embedding_table import MAX_ELEMENTS
from trt_kvcache.builder.network.packed_matrices import PackedMatrices
from trt_kvcache.builder.network.weights import LayerWeights
from trt_kvcache.checkpoint.quantized.super_blocks import SuperBlocks
from trt_kvcache.checkpoint.quantized.weight import QuantizedWeight
from trt_kvcache.errors import BuildError
from trt_kvcache.model import RoutedMlpConfig
from trt_kvcache.ops.custom_op import TensorType
from trt_kvcache.ops.expert_attributes import DOWN, UP, ExpertAttributes
from trt_kvcache.ops.experts_op import ExpertsOp

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """The weights of router and experts of a layer: packed ones, and others that are read when they are asked for."""

    config: RoutedMlpConfig
    weights: LayerWeights
    op: ExpertsOp
    packed: dict[str, PackedMatrices]  # into the experts, and out of them

    @classmethod
    def of(cls, config: RoutedMlpConfig, weights: LayerWeights, dtype: str) -> ExpertWeights:
        """Return the weights of a layer. Quantized experts are packed now: the format is an attribute of the operation."""
        found = {prefix: _packed(config, weights, roles, dtype) for prefix, roles in _roles(config).items()}
        packed = {prefix: one for prefix, one in found.items() if one is not None}
        attributes = ExpertAttributes.of(config).attributes()
        for prefix, one in packed.items():
            attributes |= one.format.attributes(prefix)
        return cls(config, weights, ExpertsOp(**attributes), packed)

    def input_types(self, hidden_size: int, dtype: str) -> dict[str, TensorType]:
        """Return the inputs of the operation, by name."""
        return self.op.input_types(hidden_size, self.config.latent_size or hidden_size, dtype)

    def array(self, name: str) -> Array:
        """Return an input of the operation that is a constant."""
        if name == "router":
            return self._router()
        if name in ("choice_bias", "expert_scale"):
            return self.weights.exact(name)
        if name == "router_bias":
            return self.weights.exact("router.bias")
        prefix, _, part = name.partition("_")
        if part in ("", "bias"):
            return self._stacked(_roles(self.config)[prefix], ".bias" if part else ".weight")
        return self.packed[prefix].arrays[part]

    def _router(self) -> Array:
        """Return the weight of the router. The scale of its normalised input is multiplied into it."""
        weight = self.weights.exact("router.weight")
        if self.config.router.norm_epsilon is None:
            return weight
        scaled: Array = weight * (self.weights.exact("router_scale") * np.float32(weight.shape[1] ** -0.5))
        return scaled

    def _stacked(self, roles: tuple[str, ...], suffix: str) -> Array:
        """Return a weight of all experts ``[E, rows, ...]``, with the rows of all roles one after another."""
        experts = range(self.config.router.num_experts)
        whole: Array | None = None
        for expert in experts:
            first = 0
            for role in roles:
                part = self.weights(f"expert_{role}.{expert}{suffix}")
                if whole is None:
                    whole = np.empty((len(experts), len(roles) * len(part), *part.shape[1:]), part.dtype)
                    self._check_size(whole)
                whole[expert, first : first + len(part)] = part
                first += len(part)
        assert whole is not None
        return whole

    def _check_size(self, whole: Array) -> None:
        if whole.size > MAX_ELEMENTS:
            raise BuildError(
                f"layers[{self.weights.layer}]: expected experts of at most {MAX_ELEMENTS} weights in 16 bits, which a tensor of TensorRT "
                f"may have, got {whole.size}. Packed weights, such as --quantize int8, take less."
            )


def _roles(config: RoutedMlpConfig) -> dict[str, tuple[str, ...]]:
    """Return the projections of an expert whose rows are concatenated, by prefix."""
    return {UP: ("gate", "up") if config.expert.gated else ("up",), DOWN: ("down",)}


def _packed(config: RoutedMlpConfig, weights: LayerWeights, roles: tuple[str, ...], dtype: str) -> PackedMatrices | None:
    """Return some projections of all experts, expert by expert; None if one is not quantized, or the kernels do not know the format."""
    parts: list[QuantizedWeight | SuperBlocks] = []
    for expert in range(config.router.num_experts):
        for role in roles:
            part = weights.stored(f"expert_{role}.{expert}.weight")
            if part is None:
                return None
            parts.append(part)
    return PackedMatrices.of(parts, dtype)
