"""Where TensorRT has no fused attention kernel, attention must be allowed to fall apart into plain layers.

TensorRT refuses to build such a layer otherwise. The choice is made here, by name and with a reason, so that it can be
shown: decomposed attention writes its scores to memory and is slower.
"""

from trt_kvcache.engine.attention_variants import AttentionLayerConfig

#: The fused kernel for one new token per slot wants this many (slot, query head) pairs at the smallest batch ...
FUSED_DECODE_MIN_QUERY_HEADS = 4

#: ... and holds one float32 score per key, and the query, in 96 KiB of shared memory: ``S + D`` is at most this.
FUSED_DECODE_MAX_SCORES = 24576


def attention_layer_config(
    layer: int, variant: str, *, dtype: str, num_attention_heads: int, head_dim: int, min_batch_size: int, max_sequence_length: int
) -> AttentionLayerConfig:
    """Choose for one layer. The limits were found by building with TensorRT for RTX 1.7 and hold for both variants of TensorRT."""
    reason = ""
    if variant == "plugin":
        return AttentionLayerConfig(layer=layer, variant=variant, decomposable=False)
    if dtype == "float32":
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
