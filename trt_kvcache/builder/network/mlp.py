"""The gated MLP of Llama and Qwen: ``down(silu(gate(x)) * up(x))``."""

from typing import Any

from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.linear import linear
from trt_kvcache.builder.network.weights import Weights


def mlp(graph: Graph, x: Any, weights: Weights, module: str, *, bias: bool) -> Any:
    """Apply a gated MLP.

    Parameters
    ----------
    graph : Graph
        The network under construction.
    x : ITensor [B, s, hidden]
        The input of the MLP.
    weights : Weights
        Weights of the model.
    module : str
        Such as ``model.layers.0.mlp``.
    bias : bool
        Whether its linear layers have biases.

    Returns
    -------
    ITensor [B, s, hidden]
        ``down_proj(silu(gate_proj(x)) * up_proj(x))``, in the dtype of ``x``. The caller adds it to the residual.
    """
    gate = linear(graph, x, weights, f"{module}.gate_proj", bias=bias)
    sigmoid = graph.op(f"{module}/sigmoid", "activation", gate, graph.trt.ActivationType.SIGMOID)
    silu = graph.elementwise(f"{module}/silu", gate, "PROD", sigmoid)
    up = linear(graph, x, weights, f"{module}.up_proj", bias=bias)
    return linear(graph, graph.elementwise(f"{module}/gated", silu, "PROD", up), weights, f"{module}.down_proj", bias=bias)
