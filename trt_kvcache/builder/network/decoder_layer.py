"""One decoder layer: mixers, MLP and per-layer input, each with its norms and a residual connection."""

from typing import Any

from trt_kvcache.builder.network.context import DecoderContext
from trt_kvcache.builder.network.gated_delta_net import gated_delta_net
from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.mamba2 import mamba2
from trt_kvcache.builder.network.mlp import mlp
from trt_kvcache.builder.network.norm import optional_norm
from trt_kvcache.builder.network.per_layer_input import add_per_layer_input
from trt_kvcache.builder.network.routed_mlp import routed_mlp
from trt_kvcache.builder.network.scalar_multiply import multiplied
from trt_kvcache.builder.network.self_attention import self_attention
from trt_kvcache.builder.network.short_convolution import short_convolution
from trt_kvcache.builder.network.weights import LayerWeights, Weights
from trt_kvcache.model import AttentionConfig, MlpConfig
from trt_kvcache.model.recurrent_config import Mamba2Config, RecurrentConfig, ShortConvConfig


def decoder_layer(graph: Graph, x: Any, weights: Weights, context: DecoderContext, index: int, mixer_input: Any = None) -> Any:
    """Apply one decoder layer to the hidden state ``[B, s, hidden]``. ``mixer_input``: in place of the norm of it."""
    module, layer = f"model.layers.{index}", context.model.layers[index]
    own = LayerWeights(weights, context.model, index, context.updates, context.plugin_layers)
    normed, network = None, graph.network
    if layer.mixer is not None:
        normed = optional_norm(graph, x, own, "input_norm", layer.input_norm) if mixer_input is None else mixer_input
        if layer.parallel_mixer is not None:  # before attention, at which a segment may end
            changed = _recurrence(graph, normed, own, context, index, layer.parallel_mixer)
            changed = multiplied(graph, f"{module}/scale_parallel_mixer", changed, layer.parallel_mixer_multiplier)
            x = graph.elementwise(f"{module}/add_parallel_mixer", x, "SUM", changed)
        mixed, x = _mix(graph, normed, own, context, index, residual=x)
        if layer.parallel and graph.network is not network:  # a segment of its own, which has the residual
            normed = optional_norm(graph, x, own, "input_norm", layer.input_norm)
        mixed = optional_norm(graph, mixed, own, "mixer_output_norm", layer.mixer_output_norm)
        mixed = multiplied(graph, f"{module}/scale_mixer", mixed, layer.residual_multiplier)
        x = graph.elementwise(f"{module}/add_mixer", x, "SUM", mixed)
    if layer.mlp is not None:
        normed = normed if layer.parallel else optional_norm(graph, x, own, "mlp_norm", layer.mlp_norm)
        if isinstance(layer.mlp, MlpConfig):
            changed = mlp(graph, normed, own, f"{module}.mlp", layer.mlp)
        else:
            changed = routed_mlp(graph, normed, own, context, index, layer.mlp)
        changed = optional_norm(graph, changed, own, "mlp_output_norm", layer.mlp_output_norm)
        changed = multiplied(graph, f"{module}/scale_mlp", changed, layer.mlp_factor)
        x = graph.elementwise(f"{module}/add_mlp", x, "SUM", changed)
    if layer.per_layer_input is not None and context.per_layer is not None:
        x = add_per_layer_input(graph, x, context.per_layer.of_layer(graph, index), own, module, layer.per_layer_input)
    if layer.output_scale:
        scale = graph.constant(f"{module}.output_scale", own("output_scale").reshape(1, 1, 1))
        x = graph.elementwise(f"{module}/scale_output", x, "PROD", scale)
    return x


def _mix(graph: Graph, x: Any, weights: LayerWeights, context: DecoderContext, index: int, *, residual: Any) -> tuple[Any, Any]:
    """Apply the mixer to the normalised hidden state; return its output, and the residual in the network that is built from now on."""
    mixer = context.model.layers[index].mixer
    if isinstance(mixer, AttentionConfig):
        return self_attention(graph, x, weights, f"model.layers.{index}.self_attn", context, index, residual=residual)
    assert mixer is not None
    return _recurrence(graph, x, weights, context, index, mixer), residual


def _recurrence(graph: Graph, x: Any, weights: LayerWeights, context: DecoderContext, index: int, mixer: RecurrentConfig) -> Any:
    """Apply a recurrent mixer to the normalised hidden state."""
    module = f"model.layers.{index}"
    if isinstance(mixer, ShortConvConfig):
        return short_convolution(graph, x, weights, f"{module}.conv", context, index, mixer)
    if isinstance(mixer, Mamba2Config):
        return mamba2(graph, x, weights, f"{module}.mamba", context, index, mixer)
    return gated_delta_net(graph, x, weights, f"{module}.linear_attn", context, index, mixer)
