"""Linear layers, ``x W^T + b``, with weights as Hugging Face stores them: ``[out, in]``."""

from typing import Any

from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.projection import projection
from trt_kvcache.builder.network.weights import LayerWeights


def linear(graph: Graph, x: Any, weights: LayerWeights, role: str, *, bias: bool) -> Any:
    """Apply a linear layer.

    Parameters
    ----------
    graph : Graph
        The network under construction.
    x : ITensor [B, s, in]
        The input of the layer.
    weights : LayerWeights
        Weights of the decoder layer.
    role : str
        Such as ``"up"``.
    bias : bool
        Whether the layer has a bias.

    Returns
    -------
    ITensor [B, s, out]
        ``x W^T``, plus the bias if there is one, in the dtype of ``x``.
    """
    module = weights.module(role)
    y = projection(graph, module, x, weights.matrix(f"{role}.weight"))
    if not bias:
        return y
    return graph.elementwise(f"{module}/add_bias", y, "SUM", graph.constant(f"{module}.bias", weights(f"{role}.bias")[None, None]))
