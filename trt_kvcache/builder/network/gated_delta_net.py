"""The gated delta net of a layer: ``out(norm(rule(q, k, v, a, b)) * silu(z))``, token by token.

Its matrix products over chunks of tokens, as Mamba-2 has them, would need the inverse of a triangular matrix: TensorRT has no layer for
it, and powers of the matrix lose all digits where keys repeat. So TensorRT loops over the new tokens; a decode step is one iteration.
"""

import math
from typing import Any

import numpy as np

from trt_kvcache.builder.network.activations import silu, softplus
from trt_kvcache.builder.network.causal_convolution import causal_convolution
from trt_kvcache.builder.network.context import DecoderContext
from trt_kvcache.builder.network.gated_norm import gated_norm
from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.linear import linear
from trt_kvcache.builder.network.scalar_multiply import multiplied
from trt_kvcache.builder.network.sizes import columns
from trt_kvcache.builder.network.states import past_state, present_state
from trt_kvcache.builder.network.token_loop import TokenLoop
from trt_kvcache.builder.network.weights import LayerWeights
from trt_kvcache.cache.recurrent_states import StateKind
from trt_kvcache.model.recurrent_config import GatedDeltaNetConfig

#: Added to the squared norms of q and k.
_NORM_EPSILON = 1e-6


def gated_delta_net(
    graph: Graph, x: Any, weights: LayerWeights, module: str, context: DecoderContext, layer: int, mixer: GatedDeltaNetConfig
) -> Any:
    """Apply the gated delta net of one layer.

    Parameters
    ----------
    graph : Graph
        The network under construction.
    x : ITensor [B, s, hidden]
        The normalised hidden state.
    weights : LayerWeights
        Weights of the decoder layer.
    module : str
        What layers without weights are named after.
    context : DecoderContext
        What all layers of the network share.
    layer : int
        Index of the layer.
    mixer : GatedDeltaNetConfig
        The mixer of the layer.

    Returns
    -------
    ITensor [B, s, hidden]
        In the dtype of the model. Convolution, rule and norm compute in float32.
    """
    is_new = context.new_tokens.is_new(graph, x)
    nothing = graph.scalar(f"{module}/nothing", 0, graph.dtype, 3)
    qkv, gate, b, a = (
        graph.op(f"{module}/{part}/new", "select", is_new, linear(graph, x, weights, f"delta_{part}", bias=False), nothing)
        for part in ("qkv", "z", "b", "a")  # what padding holds may not be finite
    )
    convolved = causal_convolution(graph, f"{module}/conv", qkv, weights, context, layer, kernel=mixer.kernel, bias=False)
    rounded = graph.cast(f"{module}/conv/round", silu(graph, f"{module}/conv", convolved), graph.dtype)  # as between two kernels
    mixed = graph.cast(f"{module}/rule/input", rounded, "float32")
    strength = graph.op(f"{module}/strength", "activation", _float32(graph, f"{module}/b", b), graph.trt.ActivationType.SIGMOID)
    strength = graph.op(f"{module}/strength/new", "select", is_new, strength, graph.scalar(f"{module}/none", 0, "float32", 3))
    past = graph.cast(f"{module}/past", past_state(graph, context, layer, StateKind.RECURRENT), "float32")
    y, present = _ruled(graph, f"{module}/rule", mixed, _decay(graph, f"{module}/decay", a, is_new, weights), strength, past, mixer)
    present_state(graph, context, layer, StateKind.RECURRENT, present)
    ruled = graph.shuffle(f"{module}/merge_heads", y, reshape=(0, 0, mixer.value_width))
    normed = gated_norm(
        graph,
        f"{module}/norm",
        graph.cast(f"{module}/rule/round", ruled, graph.dtype),
        gate,
        weights("delta_norm.weight"),
        group_size=mixer.value_head_dim,
        gate_first=False,
        epsilon=mixer.norm.epsilon,
    )
    return linear(graph, normed, weights, "delta_out", bias=False)


def _ruled(graph: Graph, name: str, mixed: Any, decay: Any, strength: Any, past: Any, mixer: GatedDeltaNetConfig) -> tuple[Any, Any]:
    """Return what the delta rule makes of the values ``[B, s, heads, value_dim]``, and the state after it; all float32.

    A token of padding has a decay of 1 and a strength of 0: it leaves the state as it is, bit for bit.
    """
    heads, key_dim = mixer.num_value_heads, mixer.key_head_dim
    q, k, v = columns(graph, f"{name}/parts", mixed, (mixer.key_width, mixer.key_width, mixer.value_width))
    q, k = (_keys(graph, f"{name}/{what}", one, mixer) for what, one in (("q", q), ("k", k)))
    v = graph.shuffle(f"{name}/values", v, reshape=(0, 0, heads, mixer.value_head_dim))
    q = multiplied(graph, f"{name}/scale", q, 1 / math.sqrt(key_dim))

    loop = TokenLoop(graph, f"{name}/tokens", v)
    keeper = loop.recurrence("state", past)
    query, key, value, kept, part = (
        loop.each(what, one) for what, one in (("q", q), ("k", k), ("v", v), ("decay", decay), ("strength", strength))
    )
    plain, transposed = graph.trt.MatrixOperation.NONE, graph.trt.MatrixOperation.TRANSPOSE
    row = {what: graph.shuffle(f"{name}/{what}_row", one, reshape=(0, 0, 1, -1)) for what, one in (("q", query), ("k", key), ("v", value))}
    factor, share = (graph.shuffle(f"{name}/{what}", one, reshape=(0, 0, 1, 1)) for what, one in (("factor", kept), ("share", part)))
    state = graph.elementwise(f"{name}/faded", graph.result(keeper), "PROD", factor)
    read = graph.op(f"{name}/read", "matrix_multiply", row["k"], plain, state, plain)
    change = graph.elementwise(f"{name}/change", graph.elementwise(f"{name}/error", row["v"], "SUB", read), "PROD", share)
    written = graph.op(f"{name}/written", "matrix_multiply", row["k"], transposed, change, plain)
    state = graph.elementwise(f"{name}/next", state, "SUM", written)
    keeper.set_input(1, state)
    out = graph.op(f"{name}/out", "matrix_multiply", row["q"], plain, state, plain)
    y = loop.stacked("out", graph.shuffle(f"{name}/out_row", out, reshape=(0, 0, mixer.value_head_dim)))
    return y, loop.last("state", keeper)


def _keys(graph: Graph, name: str, x: Any, mixer: GatedDeltaNetConfig) -> Any:
    """Return q or k ``[B, s, value heads, key_dim]``, divided by its L2 norm: heads of values share those of keys."""
    heads, key_dim = mixer.num_key_heads, mixer.key_head_dim
    x = graph.shuffle(f"{name}/heads", x, reshape=(0, 0, heads, key_dim))
    square = graph.elementwise(f"{name}/square", x, "PROD", x)
    total = graph.op(f"{name}/total", "reduce", square, graph.trt.ReduceOperation.SUM, 1 << 3, True)
    shifted = graph.elementwise(f"{name}/add_epsilon", total, "SUM", graph.scalar(f"{name}/epsilon", _NORM_EPSILON, "float32", 4))
    root = graph.op(f"{name}/sqrt", "unary", shifted, graph.trt.UnaryOperation.SQRT)
    normed = graph.elementwise(f"{name}/normed", x, "DIV", root)
    if heads == mixer.num_value_heads:
        return normed
    head_of = graph.constant(f"{name}/head_of", np.repeat(np.arange(heads, dtype=np.int32), mixer.num_value_heads // heads))
    return graph.op(f"{name}/shared", "gather", normed, head_of, 2)


def _decay(graph: Graph, name: str, a: Any, is_new: Any, weights: LayerWeights) -> Any:
    """Return what each token leaves of the state of a head, ``[B, s, heads]`` float32: 1 for padding."""
    bias = graph.constant(f"{name}/bias", weights("dt_bias").astype(np.float32).reshape(1, 1, -1))
    steps = softplus(graph, name, graph.elementwise(f"{name}/add_bias", _float32(graph, name, a), "SUM", bias))
    rates = graph.constant(f"{name}/rates", -np.exp(weights("a_log").astype(np.float32)).reshape(1, 1, -1))
    logarithm = graph.elementwise(f"{name}/logarithm", steps, "PROD", rates)
    factor = graph.op(f"{name}/factor", "unary", logarithm, graph.trt.UnaryOperation.EXP)
    return graph.op(f"{name}/new", "select", is_new, factor, graph.scalar(f"{name}/kept", 1, "float32", 3))


def _float32(graph: Graph, name: str, x: Any) -> Any:
    return graph.cast(f"{name}/to_float32", x, "float32")
