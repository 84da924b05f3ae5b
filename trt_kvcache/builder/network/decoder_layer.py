"""One decoder layer: attention and MLP, each behind a norm and beside a residual."""

from typing import Any

from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.mlp import mlp
from trt_kvcache.builder.network.rms_norm import rms_norm
from trt_kvcache.builder.network.self_attention import DecoderContext, self_attention
from trt_kvcache.builder.network.weights import Weights
from trt_kvcache.engine.attention_variants import AttentionLayerConfig


def decoder_layer(graph: Graph, x: Any, weights: Weights, context: DecoderContext, choice: AttentionLayerConfig) -> Any:
    """Apply layer ``choice.layer`` to ``x`` ``[B, s, hidden]``; the shape stays."""
    module, epsilon = f"model.layers.{choice.layer}", context.model.rms_norm_eps
    normed = rms_norm(graph, x, weights, f"{module}.input_layernorm", epsilon=epsilon)
    attended, x = self_attention(graph, normed, weights, f"{module}.self_attn", context, choice, residual=x)
    x = graph.elementwise(f"{module}/add_attention", x, "SUM", attended)
    normed = rms_norm(graph, x, weights, f"{module}.post_attention_layernorm", epsilon=epsilon)
    return graph.elementwise(f"{module}/add_mlp", x, "SUM", mlp(graph, normed, weights, f"{module}.mlp", bias=context.model.mlp_bias))
