"""The MLP of a decoder layer: ``down(activation(gate(x)) * up(x))``, or without a gate ``down(activation(up(x)))``."""

from typing import Any

from trt_kvcache.builder.network.activations import ACTIVATIONS
from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.linear import linear
from trt_kvcache.builder.network.scalar_multiply import multiplied
from trt_kvcache.builder.network.weights import LayerWeights
from trt_kvcache.model import MlpConfig


def mlp(graph: Graph, x: Any, weights: LayerWeights, module: str, config: MlpConfig) -> Any:
    """Apply an MLP to ``[B, s, hidden]``; the caller adds the residual. ``module`` names layers without weights."""
    assert isinstance(config.activation, str)
    activation = ACTIVATIONS[config.activation]
    if not config.gated:
        activated = activation(graph, module, linear(graph, x, weights, "up", bias=config.bias))
        return linear(graph, activated, weights, "down", bias=config.bias)
    gate = multiplied(graph, f"{module}/scale_gate", linear(graph, x, weights, "gate", bias=config.bias), config.gate_multiplier)
    activated = activation(graph, module, gate)
    up = linear(graph, x, weights, "up", bias=config.bias)
    return linear(graph, graph.elementwise(f"{module}/gated", activated, "PROD", up), weights, "down", bias=config.bias)
