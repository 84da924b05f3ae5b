"""The gated delta net of a layer: ``out(norm(rule(q, k, v, a, b)) * silu(z))``, in matrix products over all new tokens.

With ``g`` the logarithm of the decay of the state from the start of the step to each token, and ``k`` and ``q`` divided by their norms, the
changes ``u`` that the tokens make solve ``(I + a) u = strength * (v - exp(g) k state)`` with
``a[i, j] = strength[i] * exp(g[i] - g[j]) * (k[i] k[j])`` for ``j < i``: "Gated Delta Networks" (Yang, Kautz and Hatamizadeh, 2024). All
new tokens of an enqueue are one chunk. TensorRT's loops are not used: TensorRT for RTX 1.7 crashes when it builds one after attention.
"""

import math
from typing import Any

import numpy as np

from trt_kvcache.builder.network.activations import silu, softplus
from trt_kvcache.builder.network.causal_convolution import causal_convolution
from trt_kvcache.builder.network.context import DecoderContext
from trt_kvcache.builder.network.decay_weights import decay_weights, exp, running_sum
from trt_kvcache.builder.network.gated_norm import gated_norm
from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.linear import linear
from trt_kvcache.builder.network.scalar_multiply import multiplied
from trt_kvcache.builder.network.sizes import columns, size
from trt_kvcache.builder.network.states import past_state, present_state
from trt_kvcache.builder.network.weights import LayerWeights
from trt_kvcache.cache.recurrent_states import StateKind
from trt_kvcache.model.recurrent_config import GatedDeltaNetConfig

#: Added to the squared norms of q and k.
_NORM_EPSILON = 1e-6


def gated_delta_net(
    graph: Graph, x: Any, weights: LayerWeights, module: str, context: DecoderContext, layer: int, mixer: GatedDeltaNetConfig
) -> Any:
    """Apply the gated delta net of one layer to the normalised hidden state ``[B, s, hidden]``.

    Convolution, delta rule and norm compute in float32; the result has the dtype of the model.
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
    y, present = _ruled(
        graph, f"{module}/rule", mixed, _decay(graph, f"{module}/decay", a, is_new, weights), strength, past, context, mixer
    )
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


def _ruled(
    graph: Graph, name: str, mixed: Any, decay: Any, strength: Any, past: Any, context: DecoderContext, mixer: GatedDeltaNetConfig
) -> tuple[Any, Any]:
    """Apply the delta rule to the values ``[B, s, heads, value_dim]``; return its output and the state after it, all float32.

    A token of padding has a decay of 1 and a strength of 0: it leaves the state as it is, bit for bit.
    """
    heads, plain, transposed = mixer.num_value_heads, graph.trt.MatrixOperation.NONE, graph.trt.MatrixOperation.TRANSPOSE
    q, k, v = columns(graph, f"{name}/parts", mixed, (mixer.key_width, mixer.key_width, mixer.value_width))
    q, k = (_keys(graph, f"{name}/{what}", one, mixer) for what, one in (("q", q), ("k", k)))
    q = multiplied(graph, f"{name}/scale", q, 1 / math.sqrt(mixer.key_head_dim))
    v = graph.shuffle(f"{name}/values", v, reshape=(0, 0, heads, mixer.value_head_dim), second_transpose=(0, 2, 1, 3))
    decay, strength = (
        graph.shuffle(f"{name}/{what}", one, reshape=(0, 0, heads, 1), second_transpose=(0, 2, 1, 3))
        for what, one in (("decay", decay), ("strength", strength))
    )
    width = size(graph, f"{name}/width", mixed, 1)
    since = running_sum(graph, f"{name}/since", decay, width, exclusive=False)
    total = graph.op(f"{name}/total", "reduce", decay, graph.trt.ReduceOperation.SUM, 1 << 2, True)
    kept = exp(graph, f"{name}/kept", since)

    similar = graph.op(f"{name}/similar", "matrix_multiply", k, plain, k, transposed)
    before = decay_weights(graph, f"{name}/before", since, since, width, 1)
    read = graph.elementwise(f"{name}/read", graph.elementwise(f"{name}/faded", similar, "PROD", before), "PROD", strength)
    stored = graph.op(f"{name}/stored", "matrix_multiply", k, plain, past, plain)
    error = graph.elementwise(f"{name}/error", v, "SUB", graph.elementwise(f"{name}/stored/kept", stored, "PROD", kept))
    inverse = context.unit_triangle.inverse(graph, f"{name}/inverse", read)
    wanted = graph.elementwise(f"{name}/wanted", error, "PROD", strength)
    change = graph.op(f"{name}/change", "matrix_multiply", inverse, plain, wanted, plain)

    seen = graph.op(f"{name}/seen", "matrix_multiply", q, plain, k, transposed)
    up_to = decay_weights(graph, f"{name}/up_to", since, since, width, 0)
    weights = graph.elementwise(f"{name}/weights", seen, "PROD", up_to)
    from_tokens = graph.op(f"{name}/from_tokens", "matrix_multiply", weights, plain, change, plain)
    asked = graph.op(f"{name}/asked", "matrix_multiply", q, plain, past, plain)
    from_past = graph.elementwise(f"{name}/from_past", asked, "PROD", kept)
    y = graph.elementwise(f"{name}/sum", from_tokens, "SUM", from_past)

    left = exp(graph, f"{name}/left", graph.elementwise(f"{name}/until_end", total, "SUB", since))
    keys = graph.elementwise(f"{name}/left_keys", k, "PROD", left)
    written = graph.op(f"{name}/written", "matrix_multiply", keys, transposed, change, plain)
    remaining = graph.elementwise(f"{name}/remaining", past, "PROD", exp(graph, f"{name}/total/kept", total))
    present = graph.elementwise(f"{name}/present", remaining, "SUM", written)
    return graph.shuffle(f"{name}/tokens", y, first_transpose=(0, 2, 1, 3)), present


def _keys(graph: Graph, name: str, x: Any, mixer: GatedDeltaNetConfig) -> Any:
    """Return q or k ``[B, value heads, s, key_dim]``, divided by its L2 norm; value heads share key heads."""
    heads, key_dim = mixer.num_key_heads, mixer.key_head_dim
    x = graph.shuffle(f"{name}/heads", x, reshape=(0, 0, heads, key_dim))
    square = graph.elementwise(f"{name}/square", x, "PROD", x)
    total = graph.op(f"{name}/total", "reduce", square, graph.trt.ReduceOperation.SUM, 1 << 3, True)
    shifted = graph.elementwise(f"{name}/add_epsilon", total, "SUM", graph.scalar(f"{name}/epsilon", _NORM_EPSILON, "float32", 4))
    root = graph.op(f"{name}/sqrt", "unary", shifted, graph.trt.UnaryOperation.SQRT)
    normed = graph.elementwise(f"{name}/normed", x, "DIV", root)
    normed = graph.shuffle(f"{name}/by_head", normed, first_transpose=(0, 2, 1, 3))
    if heads == mixer.num_value_heads:
        return normed
    head_of = graph.constant(f"{name}/head_of", np.repeat(np.arange(heads, dtype=np.int32), mixer.num_value_heads // heads))
    return graph.op(f"{name}/shared", "gather", normed, head_of, 1)


def _decay(graph: Graph, name: str, a: Any, is_new: Any, weights: LayerWeights) -> Any:
    """Return the logarithm of the decay of each token and head, ``[B, s, heads]`` float32: 0 for padding."""
    bias = graph.constant(f"{name}/bias", weights("dt_bias").astype(np.float32).reshape(1, 1, -1))
    steps = softplus(graph, name, graph.elementwise(f"{name}/add_bias", _float32(graph, name, a), "SUM", bias))
    rates = graph.constant(f"{name}/rates", -np.exp(weights("a_log").astype(np.float32)).reshape(1, 1, -1))
    logarithm = graph.elementwise(f"{name}/logarithm", steps, "PROD", rates)
    return graph.op(f"{name}/new", "select", is_new, logarithm, graph.scalar(f"{name}/none", 0, "float32", 3))


def _float32(graph: Graph, name: str, x: Any) -> Any:
    return graph.cast(f"{name}/to_float32", x, "float32")
