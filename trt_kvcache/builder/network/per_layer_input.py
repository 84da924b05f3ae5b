"""Per-layer embeddings: the inputs of all layers in a step, and the part of a layer that adds its input to the hidden state."""

from typing import Any

import numpy as np

from trt_kvcache.builder.network.activations import ACTIVATIONS
from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.linear import linear
from trt_kvcache.builder.network.norm import norm, optional_norm
from trt_kvcache.builder.network.projection import projection
from trt_kvcache.builder.network.scalar_multiply import multiplied
from trt_kvcache.builder.network.weights import LayerWeights, Weights
from trt_kvcache.checkpoint.decoder_weights import NormWeights
from trt_kvcache.engine_folder.decoder_segments import PER_LAYER_INPUTS
from trt_kvcache.model import ModelConfig, PerLayerEmbeddingConfig, PerLayerInputConfig
from trt_kvcache.model.tensor_shapes import PER_LAYER_EMBEDDING, PER_LAYER_NORM, PER_LAYER_PROJECTION


class PerLayerInputs:
    """Inputs ``[B, s, layers, size]`` of all layers: of the network that computes them, and an input of each segment after it."""

    def __init__(self, graph: Graph, rows: Any, x: Any, weights: Weights, model: ModelConfig) -> None:
        assert model.per_layer_embedding is not None
        self._network = graph.network
        self._inputs = _inputs(graph, rows, x, weights, model, model.per_layer_embedding)

    def pass_on(self, graph: Graph) -> None:
        """Mark them as an output of their network, for the segments after it."""
        graph.output(self._inputs, PER_LAYER_INPUTS)

    def of_layer(self, graph: Graph, index: int) -> Any:
        """Return the input ``[B, s, size]`` of a layer."""
        if self._network is not graph.network:
            self._network = graph.network
            self._inputs = graph.input(PER_LAYER_INPUTS, graph.dtype, tuple(self._inputs.shape))
        name = f"model.layers.{index}.per_layer_input"
        return graph.op(name, "gather", self._inputs, graph.constant(f"{name}/index", np.array(index, np.int32)), 2)


def _inputs(graph: Graph, rows: Any, x: Any, weights: Weights, model: ModelConfig, config: PerLayerEmbeddingConfig) -> Any:
    """Return the inputs of all layers from ``rows`` ``[B, s, layers * size]`` of the embedding, and the input ``x`` of the first layer."""
    name, module = (stored.removesuffix(".weight") for stored in (PER_LAYER_EMBEDDING, PER_LAYER_PROJECTION))
    sizes = (0, 0, model.num_layers, config.size)
    scaled = graph.shuffle(f"{name}/layers", multiplied(graph, f"{name}/scale", rows, config.factor(graph.dtype)), reshape=sizes)
    projected = projection(graph, module, x, weights.matrix(PER_LAYER_PROJECTION))
    projected = multiplied(graph, f"{module}/scale", projected, model.hidden_size**-0.5)
    projected = graph.shuffle(f"{module}/layers", projected, reshape=sizes)
    stored = NormWeights(weights(PER_LAYER_NORM), None)
    normed = norm(graph, projected, PER_LAYER_NORM.removesuffix(".weight"), stored, config.norm)
    return multiplied(graph, f"{name}/mean", graph.elementwise(f"{name}/add_projection", normed, "SUM", scaled), 0.5**0.5)


def add_per_layer_input(graph: Graph, x: Any, own: Any, weights: LayerWeights, module: str, config: PerLayerInputConfig) -> Any:
    """Add the gated input ``own`` ``[B, s, size]`` of a layer to the hidden state ``[B, s, hidden]``."""
    gate = ACTIVATIONS[config.activation](graph, f"{module}/per_layer_gate", linear(graph, x, weights, "per_layer_gate", bias=False))
    gated = graph.elementwise(f"{module}/per_layer_gated", gate, "PROD", own)
    change = linear(graph, gated, weights, "per_layer_projection", bias=False)
    change = optional_norm(graph, change, weights, "per_layer_norm", config.output_norm)
    return graph.elementwise(f"{module}/add_per_layer_input", x, "SUM", change)
