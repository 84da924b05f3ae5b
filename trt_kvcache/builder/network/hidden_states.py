"""Hidden states in a network: those that it returns of each token, and those that the network of a draft head reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.norm import norm
from trt_kvcache.builder.network.projection import projection
from trt_kvcache.builder.network.sizes import combined, part, reshape, size
from trt_kvcache.builder.network.weights import Weights
from trt_kvcache.checkpoint.decoder_weights import NormWeights
from trt_kvcache.engine.hidden_tensors import HIDDEN_STATES
from trt_kvcache.engine.step_rows import HiddenLayers, ReducedLayers
from trt_kvcache.model import ModelConfig, NormConfig
from trt_kvcache.model.families.family import EAGLE3_PROJECTION
from trt_kvcache.model.tensor_shapes import merge_names


def add_hidden_states(graph: Graph, residuals: Sequence[Any], normed: Any, layers: HiddenLayers, weights: Weights) -> None:
    """Add the output of hidden states. ``residuals``: the residual stream before each layer, and its end; ``normed``: after the norm."""
    if layers == "final_norm":
        found = normed
    else:
        chosen = [residuals[layer] for layer in (layers.layers if isinstance(layers, ReducedLayers) else layers)]
        found = chosen[0] if len(chosen) == 1 else _joined(graph, "hidden_states/join", chosen)
        if isinstance(layers, ReducedLayers):
            found = projection(graph, "hidden_states/reduce", found, weights(EAGLE3_PROJECTION))
    graph.output(found, HIDDEN_STATES)


def step_rows(graph: Graph, rows: Any, tokens: Any) -> Any:
    """Return the rows ``[B, s, width]`` of the tokens ``[B, s]`` of an enqueue, the first ones of ``rows`` ``[most, width]``."""
    slots, width, columns = size(graph, "hidden_inputs/slots", tokens, 0), size(graph, "hidden_inputs/width", tokens, 1), rows.shape[1]
    count = combined(graph, "hidden_inputs/count", slots, "PROD", width)
    return reshape(
        graph, "hidden_inputs/of_step", part(graph, "hidden_inputs/used", rows, (0, 0), (count, columns)), (slots, width, columns)
    )


def head_inputs(graph: Graph, embedding: Any, states: Any, weights: Weights, model: ModelConfig) -> tuple[Any, Any]:
    """Return the residual stream of a draft head, and the input of its attention in place of the norm of it, None for an MTP head."""
    names = merge_names(model)
    assert names is not None, "other models have no hidden states as an input"
    config = model.merge_norm if model.eagle3_input is None else model.eagle3_input.norm
    assert config is not None
    halves = [_normed(graph, x, name, weights, config) for x, name in zip((embedding, states), names[:2], strict=True)]
    both = _joined(graph, "hidden_inputs/join", halves)
    if model.eagle3_input is None:
        return projection(graph, names[2].removesuffix(".weight"), both, weights.matrix(names[2])), None
    return halves[1] if model.eagle3_input.adds_normalised else states, both


def _normed(graph: Graph, x: Any, name: str, weights: Weights, config: NormConfig) -> Any:
    return norm(graph, x, name.removesuffix(".weight"), NormWeights(weights(name), None), config)


def _joined(graph: Graph, name: str, parts: Sequence[Any]) -> Any:
    layer = graph.layer(name, "concatenation", list(parts))
    layer.axis = 2
    return graph.result(layer)
