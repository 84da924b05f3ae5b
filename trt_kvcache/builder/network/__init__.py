"""A decoder as a TensorRT network, layer by layer, with ``INetworkDefinition``: one module per part of the model."""

from trt_kvcache.builder.network.decoder import add_decoder, add_segments
from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.weights import Weights

__all__ = ["Graph", "Weights", "add_decoder", "add_segments"]
