"""Linear layers, ``x W^T + b``, with weights as Hugging Face stores them: ``[out, in]``."""

from typing import Any

from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.projection import projection
from trt_kvcache.builder.network.weights import LayerWeights


def linear(graph: Graph, x: Any, weights: LayerWeights, role: str, *, bias: bool) -> Any:
    """Apply a linear layer of a role, such as ``"up"``, to ``[B, s, in]``."""
    module = weights.module(role)
    y = None if weights.products is None else weights.products.added(graph, weights.layer, role, x)
    if y is None:
        y = projection(graph, module, x, weights.matrix(f"{role}.weight"))
    if weights.updates is not None:
        y = weights.updates.added(graph, module, x, y, layer=weights.layer, role=role)
    if not bias:
        return y
    return graph.elementwise(f"{module}/add_bias", y, "SUM", graph.constant(f"{module}.bias", weights(f"{role}.bias")[None, None]))
