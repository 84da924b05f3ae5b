"""RMSNorm and LayerNorm from the same elementary layers: TensorRT's normalisation layer always subtracts the mean."""

from typing import Any

import numpy as np

from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.weights import LayerWeights
from trt_kvcache.checkpoint.decoder_weights import NormWeights
from trt_kvcache.model import NormConfig


def norm(graph: Graph, x: Any, module: str, weights: NormWeights[np.ndarray[Any, Any]], config: NormConfig) -> Any:
    """Return ``x / sqrt(mean(x^2) + epsilon) * (weight_offset + weight)`` over the last axis; LayerNorm first subtracts the mean.

    The quotient is float32, and rounded before the weight is applied, as in Llama, or after it and the bias, as in Gemma and LayerNorm.
    """
    rank, weight = len(x.shape), weights.weight
    wide = graph.cast(f"{module}/to_float32", x, "float32")
    if config.centered:
        wide = graph.elementwise(f"{module}/center", wide, "SUB", _mean(graph, f"{module}/center/mean", wide))
    normed = divide_by_root_mean_square(graph, wide, module, config.epsilon)
    if config.rounds_before_weight:
        normed = graph.cast(f"{module}/to_{graph.dtype}", normed, graph.dtype)
    if config.weight_offset or not config.rounds_before_weight:
        weight = weight.astype(np.float32) + np.float32(config.weight_offset)
        normed = graph.cast(f"{module}/rounded_to_float32", normed, "float32")
    shape = (1,) * (rank - 1) + (-1,)
    normed = graph.elementwise(f"{module}/scale", normed, "PROD", graph.constant(f"{module}.weight", weight.reshape(shape)))
    if weights.bias is not None:
        bias = graph.constant(f"{module}.bias", weights.bias.astype(np.float32).reshape(shape))
        normed = graph.elementwise(f"{module}/add_bias", normed, "SUM", bias)
    return graph.cast(f"{module}/round", normed, graph.dtype)


def divide_by_root_mean_square(graph: Graph, wide: Any, module: str, epsilon: float) -> Any:
    """Divide a float32 tensor by the root mean square of its last axis."""
    mean = _mean(graph, f"{module}/mean", graph.elementwise(f"{module}/square", wide, "PROD", wide))
    added = graph.scalar(f"{module}/epsilon", epsilon, "float32", len(wide.shape))
    shifted = graph.elementwise(f"{module}/add_epsilon", mean, "SUM", added)
    root = graph.op(f"{module}/sqrt", "unary", shifted, graph.trt.UnaryOperation.SQRT)
    return graph.elementwise(f"{module}/divide", wide, "DIV", root)


def _mean(graph: Graph, name: str, x: Any) -> Any:
    """Return the mean over the last axis, which is kept."""
    return graph.op(name, "reduce", x, graph.trt.ReduceOperation.AVG, 1 << (len(x.shape) - 1), True)


def optional_norm(graph: Graph, x: Any, weights: LayerWeights, role: str, config: NormConfig | None) -> Any:
    """Apply a norm of a decoder layer; without one, return ``x`` itself."""
    if config is None:
        return x
    stored = NormWeights(weights(f"{role}.weight"), weights(f"{role}.bias") if config.bias else None)
    return norm(graph, x, weights.module(role), stored, config)
