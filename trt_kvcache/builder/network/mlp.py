"""The MLP of a decoder layer: ``down(activation(gate(x)) * up(x))``, or without a gate ``down(activation(up(x)))``."""

from typing import Any

from trt_kvcache.builder.network.activations import ACTIVATIONS
from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.linear import linear
from trt_kvcache.builder.network.scalar_multiply import multiplied
from trt_kvcache.builder.network.weights import LayerWeights
from trt_kvcache.model import ClampedSwiGLU, MlpConfig


def mlp(graph: Graph, x: Any, weights: LayerWeights, module: str, config: MlpConfig, role: str = "{}") -> Any:
    """Apply an MLP to ``[B, s, hidden]``; the caller adds the residual. ``module`` names layers without weights.

    ``role``: the name of a projection, with a place for ``gate``, ``up`` or ``down``.
    """
    gate_role, up_role, down_role = (role.format(name) for name in ("gate", "up", "down"))
    if isinstance(config.activation, ClampedSwiGLU):
        gate, up = (linear(graph, x, weights, side, bias=config.bias) for side in (gate_role, up_role))
        return linear(graph, _clamped_swiglu(graph, module, gate, up, config.activation), weights, down_role, bias=config.bias)
    activation = ACTIVATIONS[config.activation]
    if not config.gated:
        activated = activation(graph, module, linear(graph, x, weights, up_role, bias=config.bias))
        return linear(graph, activated, weights, down_role, bias=config.bias)
    gate = multiplied(graph, f"{module}/scale_gate", linear(graph, x, weights, gate_role, bias=config.bias), config.gate_multiplier)
    activated = activation(graph, module, gate)
    up = linear(graph, x, weights, up_role, bias=config.bias)
    return linear(graph, graph.elementwise(f"{module}/gated", activated, "PROD", up), weights, down_role, bias=config.bias)


def _clamped_swiglu(graph: Graph, module: str, gate: Any, up: Any, config: ClampedSwiGLU) -> Any:
    """Return ``gate * sigmoid(alpha * gate) * (up + 1)``, after both are clamped, computed in float32."""

    def number(name: str, value: float) -> Any:
        return graph.scalar(f"{module}/{name}", value, "float32", 3)

    gate, up = (graph.cast(f"{module}/{name}/to_float32", one, "float32") for name, one in (("gate", gate), ("up", up)))
    gate = graph.elementwise(f"{module}/gate/at_most", gate, "MIN", number("limit_of_gate", config.limit))
    up = graph.elementwise(f"{module}/up/at_most", up, "MIN", number("limit_of_up", config.limit))
    up = graph.elementwise(f"{module}/up/at_least", up, "MAX", number("negative_limit", -config.limit))
    scaled = graph.elementwise(f"{module}/scale_gate", gate, "PROD", number("alpha", config.alpha))
    opened = graph.op(f"{module}/sigmoid", "activation", scaled, graph.trt.ActivationType.SIGMOID)
    activated = graph.elementwise(f"{module}/activated", gate, "PROD", opened)
    shifted = graph.elementwise(f"{module}/up/plus_1", up, "SUM", number("one", 1.0))
    return graph.cast(f"{module}/round", graph.elementwise(f"{module}/gated", activated, "PROD", shifted), graph.dtype)
