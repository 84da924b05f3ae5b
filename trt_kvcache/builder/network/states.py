"""States of a layer: each is an input and an output of the network."""

from typing import Any

from trt_kvcache.builder.network.context import DecoderContext
from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.cache.recurrent_states import StateKind
from trt_kvcache.engine.protocol import TensorSpec


def state_specs(context: DecoderContext, layer: int) -> dict[StateKind, tuple[TensorSpec, TensorSpec]]:
    """Return the input and output of each state of a layer."""
    index = context.indices[layer].states
    assert index is not None
    return dict(context.states[index])


def past_state(graph: Graph, context: DecoderContext, layer: int, kind: StateKind) -> Any:
    """Add the state before the step to the network."""
    past, _ = state_specs(context, layer)[kind]
    return graph.input(past.name, past.dtype, past.shape)


def present_state(graph: Graph, context: DecoderContext, layer: int, kind: StateKind, state: Any) -> None:
    """Mark a tensor as the state after the step, rounded to the dtype of the state."""
    _, present = state_specs(context, layer)[kind]
    graph.output(graph.cast(f"{present.name}/round", state, present.dtype), present.name)
