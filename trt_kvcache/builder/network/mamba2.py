"""Mamba-2 of a layer: ``out(norm(scan(x, b, c, dt) * silu(z)))`` with ``z, (x, b, c), dt = in(hidden)``."""

from typing import Any

import numpy as np

from trt_kvcache.builder.network.activations import silu, softplus
from trt_kvcache.builder.network.causal_convolution import causal_convolution
from trt_kvcache.builder.network.context import DecoderContext
from trt_kvcache.builder.network.gated_norm import gated, gated_norm
from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.linear import linear
from trt_kvcache.builder.network.scalar_multiply import multiplied
from trt_kvcache.builder.network.selective_scan import ScanInputs, selective_scan
from trt_kvcache.builder.network.sizes import columns
from trt_kvcache.builder.network.states import past_state, present_state
from trt_kvcache.builder.network.weights import LayerWeights
from trt_kvcache.cache.recurrent_states import StateKind
from trt_kvcache.model.recurrent_config import Mamba2Config


def mamba2(graph: Graph, x: Any, weights: LayerWeights, module: str, context: DecoderContext, layer: int, mixer: Mamba2Config) -> Any:
    """Apply Mamba-2 of one layer to the normalised hidden state ``[B, s, hidden]``.

    Convolution, time steps, scan and norm compute in float32; the result has the dtype of the model.
    """
    x = multiplied(graph, f"{module}/scale_input", x, mixer.input_multiplier)
    projected = linear(graph, x, weights, "mamba_in", bias=mixer.bias)
    factors = mixer.projection_factors(graph.dtype)
    if factors is not None:
        constant = graph.constant(f"{module}/factors", factors.reshape(1, 1, -1))
        projected = graph.elementwise(f"{module}/scale_parts", projected, "PROD", constant)
    is_new = context.new_tokens.is_new(graph, projected)
    nothing = graph.scalar(f"{module}/nothing", 0, graph.dtype, 3)
    projected = graph.op(f"{module}/new", "select", is_new, projected, nothing)  # what padding holds may not be finite
    gate, mixed, dt = columns(graph, f"{module}/parts", projected, (mixer.inner, mixer.channels, mixer.num_heads))
    convolved = causal_convolution(graph, f"{module}/conv", mixed, weights, context, layer, kernel=mixer.kernel, bias=mixer.conv_bias)
    scanned = _scanned(graph, silu(graph, f"{module}/conv", convolved), dt, is_new, weights, f"{module}/scan", context, layer, mixer)
    if mixer.norm is None:
        normed = gated(graph, f"{module}/gate", scanned, gate)
    else:
        normed = gated_norm(
            graph,
            f"{module}/norm",
            scanned,
            gate,
            weights("mamba_norm.weight"),
            group_size=mixer.inner // mixer.num_groups,
            gate_first=mixer.gate_first,
            epsilon=mixer.norm.epsilon,
        )
    return linear(graph, normed, weights, "mamba_out", bias=mixer.has_out_bias)


def _scanned(
    graph: Graph,
    mixed: Any,
    dt: Any,
    is_new: Any,
    weights: LayerWeights,
    name: str,
    context: DecoderContext,
    layer: int,
    mixer: Mamba2Config,
) -> Any:
    """Return the output of the scan over ``x, b, c`` ``[B, s, channels]`` float32: ``[B, s, inner]`` in the dtype of the model."""
    rounded = graph.cast(f"{name}/round_input", mixed, graph.dtype)  # as between two kernels
    mixed = graph.cast(f"{name}/input", rounded, "float32")
    group_width = mixer.num_groups * mixer.state_size
    x, b, c = columns(graph, f"{name}/parts", mixed, (mixer.inner, group_width, group_width))
    x = graph.shuffle(f"{name}/heads", x, reshape=(0, 0, mixer.num_heads, mixer.head_dim))
    b, c = (graph.shuffle(f"{name}/{what}", one, reshape=(0, 0, mixer.num_groups, mixer.state_size)) for what, one in (("b", b), ("c", c)))
    steps = _time_steps(graph, f"{name}/dt", dt, is_new, weights, mixer)
    rates = graph.constant(f"{name}/a", -np.exp(weights("a_log").astype(np.float32)).reshape(1, 1, -1))
    column = graph.shuffle(f"{name}/dt/column", steps, reshape=(0, 0, mixer.num_heads, 1))
    past = past_state(graph, context, layer, StateKind.RECURRENT)
    inputs = ScanInputs(
        x=graph.elementwise(f"{name}/scaled", x, "PROD", column),
        decay=graph.elementwise(f"{name}/decay", steps, "PROD", rates),
        b=b,
        c=c,
        past=graph.cast(f"{name}/past", past, "float32"),
    )
    y, present = selective_scan(graph, name, inputs)
    present_state(graph, context, layer, StateKind.RECURRENT, present)
    skip = graph.constant(f"{name}/d", weights("d").astype(np.float32).reshape(1, 1, -1, 1))
    y = graph.elementwise(f"{name}/add_skip", y, "SUM", graph.elementwise(f"{name}/skip", x, "PROD", skip))
    return graph.cast(f"{name}/round", graph.shuffle(f"{name}/merge_heads", y, reshape=(0, 0, mixer.inner)), graph.dtype)


def _time_steps(graph: Graph, name: str, dt: Any, is_new: Any, weights: LayerWeights, mixer: Mamba2Config) -> Any:
    """Return the time step of each token and head, ``[B, s, heads]`` float32: 0 for padding, which then changes no state."""
    wide = graph.cast(f"{name}/to_float32", dt, "float32")
    bias = graph.constant(f"{name}/bias", weights("dt_bias").astype(np.float32).reshape(1, 1, -1))
    steps = softplus(graph, name, graph.elementwise(f"{name}/add_bias", wide, "SUM", bias))
    if mixer.dt_min:
        steps = graph.elementwise(f"{name}/at_least", steps, "MAX", graph.scalar(f"{name}/min", mixer.dt_min, "float32", 3))
    if mixer.dt_max is not None:
        steps = graph.elementwise(f"{name}/at_most", steps, "MIN", graph.scalar(f"{name}/max", mixer.dt_max, "float32", 3))
    return graph.op(f"{name}/new", "select", is_new, steps, graph.scalar(f"{name}/none", 0, "float32", 3))
