"""RMSNorm from elementary layers: TensorRT's normalisation layer would subtract the mean."""

from typing import Any

from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.weights import Weights


def rms_norm(graph: Graph, x: Any, weights: Weights, module: str, *, epsilon: float) -> Any:
    """Return ``x / sqrt(mean(x^2) + epsilon) * weight`` over the last axis.

    The norm is computed in float32 and rounded before the multiplication with the weight, as Hugging Face does.

    Parameters
    ----------
    graph : Graph
        The network under construction.
    x : ITensor [..., n]
        The tensor to normalise.
    weights : Weights
        Weights of the model.
    module : str
        Its weight is ``<module>.weight``, ``[n]``.
    epsilon : float
        Added to the mean square.

    Returns
    -------
    ITensor [..., n]
        In the dtype of ``x``.
    """
    rank = len(x.shape)
    wide = graph.cast(f"{module}/to_float32", x, "float32")
    square = graph.elementwise(f"{module}/square", wide, "PROD", wide)
    mean = graph.op(f"{module}/mean", "reduce", square, graph.trt.ReduceOperation.AVG, 1 << (rank - 1), True)
    shifted = graph.elementwise(f"{module}/add_epsilon", mean, "SUM", graph.scalar(f"{module}/epsilon", epsilon, "float32", rank))
    root = graph.op(f"{module}/sqrt", "unary", shifted, graph.trt.UnaryOperation.SQRT)
    normed = graph.cast(f"{module}/to_{graph.dtype}", graph.elementwise(f"{module}/divide", wide, "DIV", root), graph.dtype)
    weight = weights(f"{module}.weight").reshape((1,) * (rank - 1) + (-1,))
    return graph.elementwise(f"{module}/scale", normed, "PROD", graph.constant(f"{module}.weight", weight))
