"""Self-attention over the cache: project, apply RoPE, append to the cache, attend, project back."""

import math
from collections.abc import Sequence
from typing import Any

from trt_kvcache.builder.network.context import DecoderContext
from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.kv_update import update_cache
from trt_kvcache.builder.network.linear import linear
from trt_kvcache.builder.network.rms_norm import rms_norm
from trt_kvcache.builder.network.rope import apply_rope
from trt_kvcache.builder.network.weights import Weights
from trt_kvcache.engine.attention_variants import AttentionLayerConfig, attention_variant
from trt_kvcache.model import AttentionConfig


def self_attention(
    graph: Graph, x: Any, weights: Weights, module: str, context: DecoderContext, config: AttentionLayerConfig, *, residual: Any
) -> tuple[Any, Any]:
    """Apply the attention of one layer.

    Parameters
    ----------
    graph : Graph
        The network under construction.
    x : ITensor [B, s, hidden]
        The normalised hidden state.
    weights : Weights
        Weights of the model.
    module : str
        Such as ``model.layers.0.self_attn``.
    context : DecoderContext
        What all layers of the network share.
    config : AttentionLayerConfig
        Of this layer.
    residual : ITensor [B, s, hidden]
        The hidden state that is needed after the attention.

    Returns
    -------
    attended : ITensor [B, s, hidden]
        The output of the projection back.
    residual : ITensor [B, s, hidden]
        ``residual`` in the network that ``graph`` now builds: see
        :class:`~trt_kvcache.builder.network.attention_lowering.AttentionLowering`.
    """
    mixer = context.model.layers[config.layer].attention
    heads = {"q": mixer.num_heads, "k": mixer.num_kv_heads, "v": mixer.num_kv_heads}
    q, k, v = (_project(graph, x, weights, module, side, count, context, mixer) for side, count in heads.items())
    if context.lowering is not None:
        attended, residual = context.lowering.add_attention(graph, config.layer, (q, k, v), residual)
    else:
        attended = _attend_with_tensorrt(graph, (q, k, v), module, context, config)
    width = mixer.num_heads * mixer.head_dim
    transpose = None if context.lowering else (0, 2, 1, 3)
    merged = graph.shuffle(f"{module}/merge_heads", attended, first_transpose=transpose, reshape=(0, 0, width))
    return linear(graph, merged, weights, f"{module}.o_proj", bias=mixer.o_bias), residual


def _project(
    graph: Graph, x: Any, weights: Weights, module: str, side: str, heads: int, context: DecoderContext, mixer: AttentionConfig
) -> Any:
    """Project ``[B, s, hidden]`` to q, k or v, split into heads, and apply the norm of q and k where the model has one.

    The result is ``[B, heads, s, D]`` for TensorRT's attention, and ``[B, s, heads, D]`` for ours.
    """
    name = f"{module}.{side}_proj"
    y = linear(graph, x, weights, name, bias=mixer.qkv_bias)
    transpose = None if context.lowering else (0, 2, 1, 3)
    y = graph.shuffle(f"{name}/split_heads", y, reshape=(0, 0, heads, mixer.head_dim), second_transpose=transpose)
    if mixer.qk_norm is None or side == "v":
        return y
    return rms_norm(graph, y, weights, f"{module}.{side}_norm", epsilon=mixer.qk_norm.norm.epsilon)


def _attend_with_tensorrt(graph: Graph, qkv: Sequence[Any], module: str, context: DecoderContext, config: AttentionLayerConfig) -> Any:
    """Apply RoPE, append to the caches, and attend: q, k and v ``[B, heads, s, D]`` to ``[B, Hq, s, D]``."""
    mixer, lengths, tables = context.model.layers[config.layer].attention, context.lengths, context.tables
    assert lengths is not None
    assert tables is not None
    q, k, v = qkv
    q = _scale(graph, f"{module}/q", apply_rope(graph, f"{module}/q", q, tables, lengths.position_ids), mixer.head_dim)
    k = graph.cast(f"{module}/k/to_{graph.dtype}", apply_rope(graph, f"{module}/k", k, tables, lengths.position_ids), graph.dtype)

    k_cache, v_cache = context.names.cache_pairs(config.layer)
    shape = (mixer.num_kv_heads, context.max_sequence_length, mixer.head_dim)
    keys = update_cache(graph, cache=k_cache, shape=shape, rows=k, start_index=lengths.start_index)
    values = update_cache(graph, cache=v_cache, shape=shape, rows=v, start_index=lengths.start_index)
    return _add_attention_layer(graph, f"{module}/attend", q, keys, values, context, config)


def _scale(graph: Graph, name: str, q: Any, head_dim: int) -> Any:
    """Multiply float32 queries by ``1 / sqrt(D)``, then round to the model's dtype: TensorRT's attention layer does not scale.

    A scale rounded to bfloat16 would change logits that are nearly tied.
    """
    factor = graph.scalar(f"{name}/scale_factor", 1.0 / math.sqrt(head_dim), "float32", 4)
    return graph.cast(f"{name}/to_{graph.dtype}", graph.elementwise(f"{name}/scale", q, "PROD", factor), graph.dtype)


def _add_attention_layer(
    graph: Graph, name: str, q: Any, keys: Any, values: Any, context: DecoderContext, config: AttentionLayerConfig
) -> Any:
    """Add TensorRT's attention layer: queries ``[B, Hq, s, D]``, keys and values ``[B, H, S, D]``; returns ``[B, Hq, s, D]``.

    With the native variant, query ``i`` of slot ``b`` sees the keys ``j <= key_lengths[b] - s + i``. With the mask variant it sees the
    keys that the mask shows; TensorRT multiplies the values of the others by 0, so they must be finite.
    """
    native = config.variant == "native"
    layer = _bare_attention_layer(graph, name, q, keys, values, is_causal=native)
    if native:
        assert context.lengths is not None
        layer.key_value_lengths = context.lengths.key_lengths
    else:
        layer.mask = context.mask
    layer.decomposable = config.decomposable
    return graph.result(layer)


def _bare_attention_layer(graph: Graph, name: str, q: Any, keys: Any, values: Any, *, is_causal: bool) -> Any:
    """Add the layer without its settings. It is causal or masked, never both: TensorRT would ignore the mask."""
    trt = graph.trt
    softmax = trt.AttentionNormalizationOp.SOFTMAX
    if not graph.tensorrt.supports(attention_variant("native")):  # its causal mask can only be aligned to the upper left
        return graph.layer(name, "attention", q, keys, values, softmax, False)
    kind = trt.CausalMaskKind.LOWER_RIGHT if is_causal else trt.CausalMaskKind.NONE
    return graph.layer(name, "attention_v2", q, keys, values, softmax, kind)
