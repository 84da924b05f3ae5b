"""Self-attention over the cache: project, rotate, write the new rows, attend, project back; the middle may be an operation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trt_kvcache.builder.network.attention_lowering import AttentionLowering
from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.kv_update import update_cache
from trt_kvcache.builder.network.linear import linear
from trt_kvcache.builder.network.rms_norm import rms_norm
from trt_kvcache.builder.network.rope import rotate
from trt_kvcache.builder.network.weights import Weights
from trt_kvcache.checkpoint import ModelConfig
from trt_kvcache.engine.attention_variants import AttentionLayerConfig, attention_variant
from trt_kvcache.engine.names import TensorNames


@dataclass(frozen=True, kw_only=True)
class DecoderContext:
    """What all attention layers of a network share.

    Parameters
    ----------
    model : ModelConfig
    names : TensorNames
    max_sequence_length : int
        S.
    lengths : StepLengths, or None
    tables : RopeTables, or None
        Neither for the ``plugin`` variant.
    mask : ITensor ``[B, 1, s, S]`` bool, or None
        Only for the ``mask`` variant.
    operation : AttentionLowering, or None
        Only for the ``plugin`` variant.
    """

    model: ModelConfig
    names: TensorNames
    max_sequence_length: int
    lengths: Any = None
    tables: Any = None
    mask: Any = None
    operation: AttentionLowering | None = None


def self_attention(
    graph: Graph, x: Any, weights: Weights, module: str, context: DecoderContext, choice: AttentionLayerConfig, *, residual: Any
) -> tuple[Any, Any]:
    """Apply the attention ``module`` to ``x`` ``[B, s, hidden]``.

    Returns
    -------
    ITensor ``[B, s, hidden]``
    residual : ITensor
        What was given, or the same values in the next network: see ``AttentionLowering``.
    """
    model = context.model
    counts = {"q": model.num_attention_heads, "k": model.num_kv_heads, "v": model.num_kv_heads}
    q, k, v = (_heads(graph, x, weights, module, side, count, context) for side, count in counts.items())
    if context.operation is not None:
        mixed, residual = context.operation.attend(graph, choice.layer, (q, k, v), residual)
    else:
        mixed = _attend_natively(graph, (q, k, v), module, context, choice)
    width = model.num_attention_heads * model.head_dim
    transpose = None if context.operation else (0, 2, 1, 3)
    merged = graph.shuffle(f"{module}/merge_heads", mixed, first_transpose=transpose, reshape=(0, 0, width))
    return linear(graph, merged, weights, f"{module}.o_proj", bias=model.o_bias), residual


def _heads(graph: Graph, x: Any, weights: Weights, module: str, side: str, heads: int, context: DecoderContext) -> Any:
    """Project ``[B, s, hidden]``, split it into ``[B, heads, s, D]``, or ``[B, s, heads, D]`` for an operation, and norm it."""
    model, name = context.model, f"{module}.{side}_proj"
    y = linear(graph, x, weights, name, bias=model.qkv_bias)
    transpose = None if context.operation else (0, 2, 1, 3)
    y = graph.shuffle(f"{name}/split_heads", y, reshape=(0, 0, heads, model.head_dim), second_transpose=transpose)
    return rms_norm(graph, y, weights, f"{module}.{side}_norm", epsilon=model.rms_norm_eps) if model.qk_norm and side != "v" else y


def _attend_natively(graph: Graph, qkv: Sequence[Any], module: str, context: DecoderContext, choice: AttentionLayerConfig) -> Any:
    """Rotate, write the new rows, attend: ``[B, heads, s, D]`` to ``[B, Hq, s, D]``."""
    model, lengths = context.model, context.lengths
    q, k, v = qkv
    q = _scale(graph, f"{module}/q", rotate(graph, f"{module}/q", q, context.tables, lengths.position_ids), model.head_dim)
    k = graph.cast(f"{module}/k/to_{graph.dtype}", rotate(graph, f"{module}/k", k, context.tables, lengths.position_ids), graph.dtype)

    k_cache, v_cache = context.names.cache_pairs(choice.layer)
    shape = (model.num_kv_heads, context.max_sequence_length, model.head_dim)
    keys = update_cache(graph, cache=k_cache, shape=shape, rows=k, start_index=lengths.start_index)
    values = update_cache(graph, cache=v_cache, shape=shape, rows=v, start_index=lengths.start_index)
    return _attend(graph, f"{module}/attend", q, keys, values, context, choice)


def _scale(graph: Graph, name: str, q: Any, head_dim: int) -> Any:
    """Multiply float32 queries by ``1 / sqrt(D)``, then round: TensorRT's attention does not scale.

    A scale rounded to bfloat16 would shift near-tied logits.
    """
    factor = graph.scalar(f"{name}/scale_factor", 1.0 / math.sqrt(head_dim), "float32", 4)
    return graph.cast(f"{name}/to_{graph.dtype}", graph.elementwise(f"{name}/scale", q, "PROD", factor), graph.dtype)


def _attend(graph: Graph, name: str, q: Any, keys: Any, values: Any, context: DecoderContext, choice: AttentionLayerConfig) -> Any:
    """Add the attention layer: queries ``[B, Hq, s, D]``, keys and values ``[B, H, S, D]``; returns ``[B, Hq, s, D]``.

    Native: row ``i`` of slot ``b`` sees the keys ``j <= key_lengths[b] - s + i``. Mask: the keys that the mask shows it;
    TensorRT multiplies the others with 0, so they must be finite.
    """
    native = choice.variant == "native"
    layer = _attention_layer(graph, name, q, keys, values, is_causal=native)
    if native:
        layer.key_value_lengths = context.lengths.key_lengths
    else:
        layer.mask = context.mask
    layer.decomposable = choice.decomposable
    return graph.result(layer)


def _attention_layer(graph: Graph, name: str, q: Any, keys: Any, values: Any, *, is_causal: bool) -> Any:
    """Add the bare layer. It is causal or masked, never both: TensorRT would drop the mask."""
    trt = graph.trt
    softmax = trt.AttentionNormalizationOp.SOFTMAX
    if not graph.tensorrt.supports(attention_variant("native")):  # its causal mask is aligned to the upper left only
        return graph.layer(name, "attention", q, keys, values, softmax, False)
    kind = trt.CausalMaskKind.LOWER_RIGHT if is_causal else trt.CausalMaskKind.NONE
    return graph.layer(name, "attention_v2", q, keys, values, softmax, kind)
