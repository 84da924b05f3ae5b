"""The gated MLP of a decoder layer: ``down(activation(gate(x)) * up(x))``."""

from typing import Any

from trt_kvcache.builder.network.activations import gelu_tanh, silu
from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.linear import linear
from trt_kvcache.builder.network.weights import LayerWeights
from trt_kvcache.model import MlpConfig


def mlp(graph: Graph, x: Any, weights: LayerWeights, module: str, config: MlpConfig) -> Any:
    """Apply a gated MLP.

    Parameters
    ----------
    graph : Graph
        The network under construction.
    x : ITensor [B, s, hidden]
        The input of the MLP.
    weights : LayerWeights
        Weights of the decoder layer.
    module : str
        What layers without weights are named after, such as ``model.layers.0.mlp``.
    config : MlpConfig
        The activation, and whether there are biases.

    Returns
    -------
    ITensor [B, s, hidden]
        ``down(activation(gate(x)) * up(x))``, in the dtype of ``x``. The caller adds it to the residual.
    """
    gate = linear(graph, x, weights, "gate", bias=config.bias)
    activated = silu(graph, module, gate) if config.activation == "silu" else gelu_tanh(graph, module, gate)
    up = linear(graph, x, weights, "up", bias=config.bias)
    return linear(graph, graph.elementwise(f"{module}/gated", activated, "PROD", up), weights, "down", bias=config.bias)
