"""RMSNorm from elementary layers: TensorRT's normalisation layer would subtract the mean."""

from typing import Any

import numpy as np

from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.weights import LayerWeights
from trt_kvcache.model import NormConfig


def rms_norm(graph: Graph, x: Any, module: str, weight: np.ndarray[Any, Any], norm: NormConfig) -> Any:
    """Return ``x / sqrt(mean(x^2) + epsilon) * (weight_offset + weight)`` over the last axis.

    The quotient is computed in float32. Either it is rounded before the multiplication with the weight, as Llama does, or the product
    is, as Gemma does. A sum of offset and weight is a constant of the network in float32.

    Parameters
    ----------
    graph : Graph
        The network under construction.
    x : ITensor [..., n]
        The tensor to normalise.
    module : str
        What the layers are named after.
    weight : ndarray [n]
        In the dtype of the model.
    norm : NormConfig
        Epsilon, offset, and where it is rounded.

    Returns
    -------
    ITensor [..., n]
        In the dtype of the model.
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
    """Apply a norm of a decoder layer, if it has it.

    Parameters
    ----------
    graph : Graph
        The network under construction.
    x : ITensor [..., n]
        The tensor to normalise.
    weights : LayerWeights
        Weights of the decoder layer.
    role : str
        Such as ``"input_norm"``.
    norm : NormConfig or None
        What is computed.

    Returns
    -------
    ITensor [..., n]
        As :func:`rms_norm`; ``x`` itself where there is no norm.
    """
    return x if norm is None else rms_norm(graph, x, weights.module(role), weights(f"{role}.weight"), norm)
