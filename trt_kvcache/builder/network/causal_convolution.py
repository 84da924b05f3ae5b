"""The causal depthwise convolution of recurrent layers, over the new tokens and the inputs before them."""

from typing import Any

import numpy as np

from trt_kvcache.builder.network.context import DecoderContext
from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.sizes import part, size
from trt_kvcache.builder.network.states import past_state, present_state
from trt_kvcache.builder.network.weights import LayerWeights
from trt_kvcache.cache.recurrent_states import StateKind


def causal_convolution(
    graph: Graph, name: str, x: Any, weights: LayerWeights, context: DecoderContext, layer: int, *, kernel: int, bias: bool
) -> Any:
    """Convolve the new tokens ``x`` ``[B, s, channels]``, and add the states before and after the step; returns float32.

    The state is the last K inputs of a slot. Padding leaves no trace in it; a slot without new tokens keeps its state bit for bit.
    """
    channels = x.shape[2]
    past = graph.shuffle(f"{name}/past", past_state(graph, context, layer, StateKind.CONV), second_transpose=(0, 2, 1))
    inputs = graph.layer(f"{name}/inputs", "concatenation", [past, x])
    inputs.axis = 1
    inputs = graph.result(inputs)  # [B, K + s, channels]

    columns = weights("conv.weight").astype(np.float32).reshape(channels, kernel)
    sizes = (size(graph, f"{name}/slots", x, 0), size(graph, f"{name}/width", x, 1), channels)
    total = None
    for column in range(kernel):
        step = f"{name}/{column}"
        shifted = graph.cast(f"{step}/to_float32", part(graph, step, inputs, (0, column + 1, 0), sizes), "float32")
        weight = graph.constant(f"{step}/weight", columns[:, column].reshape(1, 1, -1))
        product = graph.elementwise(f"{step}/product", shifted, "PROD", weight)
        total = product if total is None else graph.elementwise(f"{step}/sum", total, "SUM", product)
    if bias:
        own = graph.constant(f"{name}/bias", weights("conv.bias").astype(np.float32).reshape(1, 1, -1))
        total = graph.elementwise(f"{name}/add_bias", total, "SUM", own)

    first = graph.shuffle(f"{name}/first_kept", context.new_tokens.lengths(graph), reshape=(-1, 1))
    offsets = graph.constant(f"{name}/kept_offsets", np.arange(kernel, dtype=np.int32).reshape(1, -1))
    kept = graph.layer(
        f"{name}/kept", "gather_v2", inputs, graph.elementwise(f"{name}/kept_inputs", first, "SUM", offsets), graph.trt.GatherMode.DEFAULT
    )
    kept.axis = 1
    kept.num_elementwise_dims = 1  # the slots
    present = graph.shuffle(f"{name}/present", graph.result(kept), second_transpose=(0, 2, 1))
    present_state(graph, context, layer, StateKind.CONV, present)
    return total
