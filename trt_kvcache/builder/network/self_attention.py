"""Self-attention over the cache: project, apply RoPE, append to the cache, attend, project back."""

from collections.abc import Sequence
from typing import Any

from trt_kvcache.builder.network.context import DecoderContext
from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.kv_update import update_cache
from trt_kvcache.builder.network.linear import linear
from trt_kvcache.builder.network.norm import divide_by_root_mean_square, optional_norm
from trt_kvcache.builder.network.query_scaling import scale_queries
from trt_kvcache.builder.network.rope import RopeTables, apply_rope
from trt_kvcache.builder.network.scalar_multiply import multiplied
from trt_kvcache.builder.network.softcapped_attention import softcapped_attention
from trt_kvcache.builder.network.weights import LayerWeights
from trt_kvcache.engine.attention_variants import AttentionLayerConfig, attention_variant, window_in_cache
from trt_kvcache.engine_folder.decoder_segments import hidden_state_name, output_gate_name, rope_kind
from trt_kvcache.model import AttentionConfig


def self_attention(
    graph: Graph, x: Any, weights: LayerWeights, module: str, context: DecoderContext, layer: int, *, residual: Any
) -> tuple[Any, Any]:
    """Apply the attention of one layer to the normalised hidden state; return its output, and the residual.

    A segment cut passes the residual on to the next network: see ``AttentionLowering``.
    """
    mixer = context.model.layers[layer].attention
    x = multiplied(graph, f"{module}/scale_input", x, mixer.input_multiplier)
    heads = {"q": mixer.num_heads, **dict.fromkeys(("k", "v") if mixer.stores_kv else (), mixer.num_kv_heads)}
    rotation = _rotation_before_norms(graph, x, context, mixer)
    rows = {side: linear(graph, x, weights, side, bias=mixer.qkv_bias) for side in heads if side != "v" or not mixer.values_are_keys}
    if mixer.values_are_keys:
        rows["v"] = rows["k"]
    q, *new = (_split(graph, rows[side], weights, side, count, context, mixer, rotation) for side, count in heads.items())
    kept = {hidden_state_name(layer): residual}
    if mixer.output_gate:
        kept[output_gate_name(layer)] = linear(graph, x, weights, "output_gate", bias=mixer.qkv_bias)
    if context.lowering is not None:
        if mixer.query_scaling is not None:
            factors = context.lowering.query_factors(graph, mixer.query_scaling, x)
            q = scale_queries(graph, f"{module}/q/by_position", q, factors, heads_first=False)
        attended, next_kept = context.lowering.add_attention(graph, layer, (q, *new), kept)
        kept = dict(next_kept)
    else:
        attended = _attend_with_tensorrt(graph, q, new, module, context, context.attention[layer])
    width = mixer.num_heads * mixer.head_dim
    transpose = None if context.lowering else (0, 2, 1, 3)
    merged = graph.shuffle(f"{module}/merge_heads", attended, first_transpose=transpose, reshape=(0, 0, width))
    if mixer.output_gate:
        sigmoid = graph.op(f"{module}/gate", "activation", kept[output_gate_name(layer)], graph.trt.ActivationType.SIGMOID)
        merged = graph.elementwise(f"{module}/gated", merged, "PROD", sigmoid)
    return linear(graph, merged, weights, "o", bias=mixer.o_bias), kept[hidden_state_name(layer)]


def _rotation_before_norms(graph: Graph, x: Any, context: DecoderContext, mixer: AttentionConfig) -> tuple[RopeTables, Any] | None:
    """Return the tables and positions of RoPE if it is applied before the norms of q and k, else None."""
    kind = rope_kind(mixer) if mixer.rotates_before_norm else None
    if kind is None:
        return None
    if context.lowering is not None:
        return context.lowering.rope(graph, kind, x)
    assert context.lengths is not None
    return context.tables[kind], context.lengths.position_ids


def _split(
    graph: Graph,
    y: Any,
    weights: LayerWeights,
    side: str,
    heads: int,
    context: DecoderContext,
    mixer: AttentionConfig,
    rotation: tuple[RopeTables, Any] | None,
) -> Any:
    """Split the rows ``[B, s, heads * D]`` of q, k or v into heads, and apply the norms that the model has.

    The result is ``[B, heads, s, D]`` for TensorRT's attention, and ``[B, s, heads, D]`` for ours. ``rotation``: RoPE before the norm.
    """
    qk_norm, rotation = (None, None) if side == "v" else (mixer.qk_norm, rotation)
    if qk_norm is not None and qk_norm.over == "full":
        y = optional_norm(graph, y, weights, f"{side}_norm", qk_norm.norm)
    module = f"{weights.module('k')}/values" if side == "v" and mixer.values_are_keys else weights.module(side)
    swapped = (0, 2, 1, 3)
    transpose = None if context.lowering and rotation is None else swapped
    y = graph.shuffle(f"{module}/split_heads", y, reshape=(0, 0, heads, mixer.head_dim), second_transpose=transpose)
    if rotation is not None:
        y = graph.cast(f"{module}/rotate/round", apply_rope(graph, module, y, *rotation), graph.dtype)
    if qk_norm is not None and qk_norm.over == "head":
        y = optional_norm(graph, y, weights, f"{side}_norm", qk_norm.norm)
    if side == "v" and mixer.v_norm_epsilon is not None:
        wide = graph.cast(f"{module}/norm/to_float32", y, "float32")
        y = graph.cast(f"{module}/norm/round", divide_by_root_mean_square(graph, wide, f"{module}/norm", mixer.v_norm_epsilon), graph.dtype)
    if rotation is not None and context.lowering is not None:
        y = graph.shuffle(f"{module}/rotate/tokens_first", y, first_transpose=swapped)
    return y


def _attend_with_tensorrt(
    graph: Graph, q: Any, new: Sequence[Any], module: str, context: DecoderContext, config: AttentionLayerConfig
) -> Any:
    """Apply RoPE, append ``new`` k and v, if there are any, to the caches, and attend: ``[B, heads, s, D]`` to ``[B, Hq, s, D]``."""
    mixer, lengths = context.model.layers[config.layer].attention, context.lengths
    assert lengths is not None
    kind = rope_kind(mixer.after_norms)
    tables = None if kind is None else context.tables[kind]
    q = apply_rope(graph, f"{module}/q", q, tables, lengths.position_ids)
    if mixer.query_scaling is not None:
        q = scale_queries(graph, f"{module}/q/by_position", q, context.query_factors[mixer.query_scaling], heads_first=True)
    q = _scale(graph, f"{module}/q", q, mixer.score_scale)
    if mixer.kv_source_layer is None:
        k, v = new
        k = apply_rope(graph, f"{module}/k", k, tables, lengths.position_ids)
        k = graph.cast(f"{module}/k/to_{graph.dtype}", k, graph.dtype)
        context.stored[config.layer] = _updated(graph, k, v, context, config.layer)
    keys, values = context.stored[config.layer if mixer.kv_source_layer is None else mixer.kv_source_layer]
    return _add_attention_layer(graph, f"{module}/attend", q, keys, values, context, config)


def _updated(graph: Graph, k: Any, v: Any, context: DecoderContext, layer: int) -> tuple[Any, Any]:
    """Append k and v to the caches of a layer and return all its rows."""
    mixer, lengths = context.model.layers[layer].attention, context.lengths
    assert lengths is not None
    k_cache, v_cache = context.names.cache_pairs(_cache_index(context, layer))
    shape = (mixer.num_kv_heads, context.max_sequence_length, mixer.head_dim)
    keys = update_cache(graph, cache=k_cache, shape=shape, rows=k, start_index=lengths.start_index)
    values = update_cache(graph, cache=v_cache, shape=shape, rows=v, start_index=lengths.start_index)
    return keys, values


def _cache_index(context: DecoderContext, layer: int) -> int:
    """Return the index of a layer's K and V among the caches."""
    index = context.indices[layer].kv
    assert index is not None
    return index


def _scale(graph: Graph, name: str, q: Any, scale: float) -> Any:
    """Multiply float32 queries by the scale of scores, then round to the model's dtype: TensorRT's attention layer does not scale.

    A scale rounded to bfloat16 would change logits that are nearly tied.
    """
    factor = graph.scalar(f"{name}/scale_factor", scale, "float32", 4)
    return graph.cast(f"{name}/to_{graph.dtype}", graph.elementwise(f"{name}/scale", q, "PROD", factor), graph.dtype)


def _add_attention_layer(
    graph: Graph, name: str, q: Any, keys: Any, values: Any, context: DecoderContext, config: AttentionLayerConfig
) -> Any:
    """Attend: queries ``[B, Hq, s, D]``, keys and values ``[B, H, S, D]``; returns ``[B, Hq, s, D]``.

    Native: query ``i`` sees keys ``j <= key_lengths[b] - s + i``. Mask: others are multiplied by 0, so must be finite.
    """
    mixer, native = context.model.layers[config.layer].attention, config.variant == "native"
    mask = None if native else context.masks[window_in_cache(mixer, context.max_sequence_length)]
    if mixer.softcap is not None:
        return softcapped_attention(graph, name, q, keys, values, mask, mixer)
    layer = bare_attention_layer(graph, name, q, keys, values, is_causal=native)
    if native:
        assert context.lengths is not None
        layer.key_value_lengths = context.lengths.key_lengths
    else:
        layer.mask = mask
    layer.decomposable = config.decomposable
    return graph.result(layer)


def bare_attention_layer(graph: Graph, name: str, q: Any, keys: Any, values: Any, *, is_causal: bool) -> Any:
    """Add the layer without its settings. It is causal or masked, never both: TensorRT would ignore the mask."""
    trt = graph.trt
    softmax = trt.AttentionNormalizationOp.SOFTMAX
    if not graph.tensorrt.supports(attention_variant("native")):  # its causal mask can only be aligned to the upper left
        return graph.layer(name, "attention", q, keys, values, softmax, False)
    kind = trt.CausalMaskKind.LOWER_RIGHT if is_causal else trt.CausalMaskKind.NONE
    return graph.layer(name, "attention_v2", q, keys, values, softmax, kind)
