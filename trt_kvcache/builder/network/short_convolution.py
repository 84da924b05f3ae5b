"""The gated short convolution of a layer: ``out(c * conv(b * x))`` with ``b, c, x = in(hidden)``."""

from typing import Any

from trt_kvcache.builder.network.causal_convolution import causal_convolution
from trt_kvcache.builder.network.context import DecoderContext
from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.linear import linear
from trt_kvcache.builder.network.sizes import columns
from trt_kvcache.builder.network.weights import LayerWeights
from trt_kvcache.model.recurrent_config import ShortConvConfig


def short_convolution(
    graph: Graph, x: Any, weights: LayerWeights, module: str, context: DecoderContext, layer: int, mixer: ShortConvConfig
) -> Any:
    """Apply the short convolution of one layer to the normalised hidden state ``[B, s, hidden]``; sums are float32."""
    projected = linear(graph, x, weights, "conv_in", bias=mixer.bias)
    b, c, inner = columns(graph, f"{module}/parts", projected, (mixer.channels,) * 3)
    gated = graph.elementwise(f"{module}/gate_in", b, "PROD", inner)
    convolved = causal_convolution(graph, f"{module}/conv", gated, weights, context, layer, kernel=mixer.kernel, bias=mixer.bias)
    gate = graph.cast(f"{module}/gate/to_float32", c, "float32")
    mixed = graph.elementwise(f"{module}/gate_out", convolved, "PROD", gate)
    return linear(graph, graph.cast(f"{module}/round", mixed, graph.dtype), weights, "conv_out", bias=mixer.bias)
