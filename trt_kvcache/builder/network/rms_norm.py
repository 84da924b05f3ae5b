"""RMSNorm from elementary layers: TensorRT's normalisation layer would subtract the mean."""

from typing import Any

import numpy as np

from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.weights import LayerWeights
from trt_kvcache.model import NormConfig


def rms_norm(graph: Graph, x: Any, module: str, weight: np.ndarray[Any, Any], norm: NormConfig) -> Any:
    """Return ``x / sqrt(mean(x^2) + epsilon) * (weight_offset + weight)`` over the last axis.

    The quotient is float32, and rounded before the weight is applied, as in Llama, or after it, as in Gemma.
    """
    rank = len(x.shape)
    wide = graph.cast(f"{module}/to_float32", x, "float32")
    square = graph.elementwise(f"{module}/square", wide, "PROD", wide)
    mean = graph.op(f"{module}/mean", "reduce", square, graph.trt.ReduceOperation.AVG, 1 << (rank - 1), True)
    shifted = graph.elementwise(f"{module}/add_epsilon", mean, "SUM", graph.scalar(f"{module}/epsilon", norm.epsilon, "float32", rank))
    root = graph.op(f"{module}/sqrt", "unary", shifted, graph.trt.UnaryOperation.SQRT)
    normed = graph.elementwise(f"{module}/divide", wide, "DIV", root)
    if norm.rounds_before_weight:
        normed = graph.cast(f"{module}/to_{graph.dtype}", normed, graph.dtype)
    if norm.weight_offset or not norm.rounds_before_weight:
        weight = weight.astype(np.float32) + np.float32(norm.weight_offset)
        normed = graph.cast(f"{module}/rounded_to_float32", normed, "float32")
    factor = graph.constant(f"{module}.weight", weight.reshape((1,) * (rank - 1) + (-1,)))
    return graph.cast(f"{module}/round", graph.elementwise(f"{module}/scale", normed, "PROD", factor), graph.dtype)


def layer_norm(graph: Graph, x: Any, weights: LayerWeights, role: str, norm: NormConfig | None) -> Any:
    """Apply a norm of a decoder layer; without one, return ``x`` itself."""
    return x if norm is None else rms_norm(graph, x, weights.module(role), weights(f"{role}.weight"), norm)
