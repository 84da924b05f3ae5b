"""Linear layers, ``x W^T + b``, with weights as Hugging Face stores them: ``[out, in]``."""

from typing import Any

from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.weights import Weights


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


def linear(graph: Graph, x: Any, weights: Weights, module: str, *, bias: bool) -> Any:
    """Apply a linear layer.

    Parameters
    ----------
    graph : Graph
        The network under construction.
    x : ITensor [B, s, in]
        The input of the layer.
    weights : Weights
        Weights of the model.
    module : str
        Such as ``model.layers.0.mlp.up_proj``. Its weights are ``<module>.weight`` and, if ``bias``, ``<module>.bias``.
    bias : bool
        Whether the layer has a bias.

    Returns
    -------
    ITensor [B, s, out]
        ``x W^T``, plus the bias if there is one, in the dtype of ``x``.
    """
    weight = graph.constant(f"{module}.weight", weights(f"{module}.weight")[None])
    y = matmul_transposed(graph, f"{module}/matmul", x, weight)
    if not bias:
        return y
    return graph.elementwise(f"{module}/add_bias", y, "SUM", graph.constant(f"{module}.bias", weights(f"{module}.bias")[None, None]))
