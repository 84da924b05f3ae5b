"""Linear layers, ``x W^T + b``, with weights as Hugging Face stores them: ``[out, in]``."""

from typing import Any

from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.weights import LayerWeights


def matmul_transposed(graph: Graph, name: str, x: Any, weight: Any) -> Any:
    """Return ``x weight^T``.

    Parameters
    ----------
    graph : Graph
        The network under construction.
    name : str
        Name of the layer.
    x : ITensor [..., in]
        The left operand.
    weight : ITensor [..., out, in]
        Of the rank of ``x``.

    Returns
    -------
    ITensor [..., out]
        The product over the last dimension of both, in their dtype.
    """
    plain, transposed = graph.trt.MatrixOperation.NONE, graph.trt.MatrixOperation.TRANSPOSE
    return graph.op(name, "matrix_multiply", x, plain, weight, transposed)


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
    weight = graph.constant(f"{module}.weight", weights(f"{role}.weight")[None])
    y = matmul_transposed(graph, f"{module}/matmul", x, weight)
    if not bias:
        return y
    return graph.elementwise(f"{module}/add_bias", y, "SUM", graph.constant(f"{module}.bias", weights(f"{role}.bias")[None, None]))
