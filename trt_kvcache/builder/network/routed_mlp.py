"""A routed MLP: experts and their router in a plugin layer, and everything around them in TensorRT's own layers."""

from typing import Any

from trt_kvcache.builder.network.context import DecoderContext
from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.linear import linear
from trt_kvcache.builder.network.mlp import mlp
from trt_kvcache.builder.network.norm import divide_by_root_mean_square, optional_norm
from trt_kvcache.builder.network.weights import LayerWeights
from trt_kvcache.model import RoutedMlpConfig


def routed_mlp(graph: Graph, x: Any, weights: LayerWeights, context: DecoderContext, index: int, config: RoutedMlpConfig) -> Any:
    """Apply a routed MLP to ``[B, s, hidden]``; the caller adds the residual."""
    module, norm = f"model.layers.{index}.mlp", config.branch_norm
    rows = optional_norm(graph, x, weights, "experts_norm", norm)
    if config.latent_size is not None:
        rows = linear(graph, rows, weights, "latent_in", bias=config.latent_bias)
    mixed = _experts(graph, _router_rows(graph, x, module, config), rows, context, index)
    if config.latent_size is not None:
        mixed = linear(graph, mixed, weights, "latent_out", bias=config.latent_bias)
    mixed = optional_norm(graph, mixed, weights, "experts_output_norm", norm)
    if config.shared is None:
        return mixed
    normed = optional_norm(graph, x, weights, "shared_norm", norm)
    shared = mlp(graph, normed, weights, f"{module}.shared", config.shared, "shared_{}")
    shared = optional_norm(graph, shared, weights, "shared_output_norm", norm)
    if config.shared_gate:
        gate = linear(graph, x, weights, "shared_expert_gate", bias=False)
        opened = graph.op(f"{module}/shared_gate", "activation", gate, graph.trt.ActivationType.SIGMOID)
        shared = graph.elementwise(f"{module}/gate_shared", shared, "PROD", opened)
    return graph.elementwise(f"{module}/add_shared", mixed, "SUM", shared)


def _router_rows(graph: Graph, x: Any, module: str, config: RoutedMlpConfig) -> Any:
    """Return the input of the router, whose scale is a factor of its weight."""
    epsilon = config.router.norm_epsilon
    if epsilon is None:
        return x
    wide = graph.cast(f"{module}/router_norm/to_float32", x, "float32")
    normed = divide_by_root_mean_square(graph, wide, f"{module}/router_norm", epsilon)
    return graph.cast(f"{module}/router_norm/round", normed, graph.dtype)


def _experts(graph: Graph, router_rows: Any, rows: Any, context: DecoderContext, index: int) -> Any:
    """Add the plugin layer of the experts, and its weights as constants."""
    assert context.plugin_layers is not None
    node, stored = context.plugin_layers.experts[index]
    names = [name for name in stored.input_types(context.model.hidden_size, graph.dtype) if name not in ("router_rows", "rows")]
    constants = [graph.constant(f"{node.name}.{name}", stored.array(name)) for name in names]
    return graph.result(context.plugin_layers.layers.add(node, [router_rows, rows, *constants]))
