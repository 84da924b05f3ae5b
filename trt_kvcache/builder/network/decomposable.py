"""``attention_layer_config``: decide, with a reason, if TensorRT may decompose the attention of a layer.

Where TensorRT has no fused attention kernel, it refuses to build the layer unless ``IAttention.decomposable`` allows it to use several
plain layers instead. That is decided here, with a reason that can be shown: decomposed attention writes its scores to memory and is
slower. TensorRT takes a fused kernel where it has one, whether the layer is decomposable or not.
"""

from trt_kvcache.engine.attention_variants import AttentionLayerConfig

#: The fused kernel for one new token per slot needs at least this many query heads, over all slots of the smallest batch.
FUSED_DECODE_MIN_QUERY_HEADS = 4

#: It keeps one float32 score per key, and the query, in 96 KiB of shared memory: ``S + D`` is at most this.
FUSED_DECODE_MAX_SCORES = 24576


def attention_layer_config(
    layer: int,
    variant: str,
    *,
    is_rtx: bool = True,
    dtype: str,
    num_attention_heads: int,
    head_dim: int,
    softcap: float | None = None,
    min_batch_size: int,
    max_sequence_length: int,
) -> AttentionLayerConfig:
    """Return whether TensorRT may decompose the attention of a layer into plain layers, and why.

    The limits were found by building with TensorRT for RTX 1.7; for full TensorRT every layer is decomposable.
    """
    reason = ""
    if variant == "plugin":
        return AttentionLayerConfig(layer=layer, variant=variant, decomposable=False)
    if softcap is not None:
        reason = "no attention layer with soft-capped scores"
    elif not is_rtx:
        reason = "full TensorRT decides: its limits of fused attention are not known"
    elif dtype == "float32":
        reason = "no fused attention in float32"
    elif min_batch_size * num_attention_heads < FUSED_DECODE_MIN_QUERY_HEADS:
        reason = (
            f"no fused decode attention for fewer than {FUSED_DECODE_MIN_QUERY_HEADS} query heads in the smallest batch "
            f"(batch {min_batch_size} x {num_attention_heads} heads)"
        )
    elif max_sequence_length + head_dim > FUSED_DECODE_MAX_SCORES:
        reason = (
            f"no fused decode attention for max_sequence_length + head_dim above {FUSED_DECODE_MAX_SCORES} "
            f"({max_sequence_length} + {head_dim})"
        )
    return AttentionLayerConfig(layer=layer, variant=variant, decomposable=bool(reason), reason=reason)
