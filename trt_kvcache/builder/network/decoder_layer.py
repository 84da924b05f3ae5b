"""One decoder layer: attention and MLP, each with a norm before it and a residual connection around it."""

from typing import Any

from trt_kvcache.builder.network.context import DecoderContext
from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.mlp import mlp
from trt_kvcache.builder.network.rms_norm import rms_norm
from trt_kvcache.builder.network.self_attention import self_attention
from trt_kvcache.builder.network.weights import Weights
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
    assert layer.input_norm is not None  # models without are refused before a network is made
    assert layer.mlp_norm is not None
    assert layer.mlp is not None
    normed = rms_norm(graph, x, weights, f"{module}.input_layernorm", epsilon=layer.input_norm.epsilon)
    attended, x = self_attention(graph, normed, weights, f"{module}.self_attn", context, config, residual=x)
    x = graph.elementwise(f"{module}/add_attention", x, "SUM", attended)
    normed = rms_norm(graph, x, weights, f"{module}.post_attention_layernorm", epsilon=layer.mlp_norm.epsilon)
    return graph.elementwise(f"{module}/add_mlp", x, "SUM", mlp(graph, normed, weights, f"{module}.mlp", bias=layer.mlp.bias))
