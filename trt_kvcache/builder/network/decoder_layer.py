"""One decoder layer: attention and MLP, each with norms around it and a residual connection around these."""

from typing import Any

from trt_kvcache.builder.network.context import DecoderContext
from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.mlp import mlp
from trt_kvcache.builder.network.rms_norm import layer_norm
from trt_kvcache.builder.network.scalar_multiply import multiplied
from trt_kvcache.builder.network.self_attention import self_attention
from trt_kvcache.builder.network.weights import LayerWeights, Weights
from trt_kvcache.engine.attention_variants import AttentionLayerConfig


def decoder_layer(graph: Graph, x: Any, weights: Weights, context: DecoderContext, config: AttentionLayerConfig) -> Any:
    """Apply one decoder layer.

    Parameters
    ----------
    graph : Graph
        The network under construction.
    x : ITensor [B, s, hidden]
        The hidden state before the layer.
    weights : Weights
        Weights of the model.
    context : DecoderContext
        What all layers of the network share.
    config : AttentionLayerConfig
        Of this layer.

    Returns
    -------
    ITensor [B, s, hidden]
        The hidden state after the layer.
    """
    module, layer = f"model.layers.{config.layer}", context.model.layers[config.layer]
    assert layer.mlp is not None  # models without are refused before a network is made
    own = LayerWeights(weights, context.model, config.layer)
    normed = layer_norm(graph, x, own, "input_norm", layer.input_norm)
    attended, x = self_attention(graph, normed, own, f"{module}.self_attn", context, config, residual=x)
    attended = layer_norm(graph, attended, own, "mixer_output_norm", layer.mixer_output_norm)
    attended = multiplied(graph, f"{module}/scale_attention", attended, layer.residual_multiplier)
    x = graph.elementwise(f"{module}/add_attention", x, "SUM", attended)
    normed = layer_norm(graph, x, own, "mlp_norm", layer.mlp_norm)
    changed = layer_norm(graph, mlp(graph, normed, own, f"{module}.mlp", layer.mlp), own, "mlp_output_norm", layer.mlp_output_norm)
    changed = multiplied(graph, f"{module}/scale_mlp", changed, layer.residual_multiplier)
    return graph.elementwise(f"{module}/add_mlp", x, "SUM", changed)
