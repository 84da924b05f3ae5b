"""Inputs, outputs and optimisation profiles of an engine of this package: stated once, for builder, folder and inspection."""

from trt_kvcache.cache.config import KVCacheConfig, KVLayerConfig
from trt_kvcache.cache.layout import KVLayout
from trt_kvcache.checkpoint import ModelConfig
from trt_kvcache.engine.attention_variants import cache_layout
from trt_kvcache.engine.names import TensorNames
from trt_kvcache.engine.protocol import EngineProfile, TensorSpec

#: Slots in the smallest enqueue of every profile.
MIN_BATCH_SIZE = 1


def cache_config(
    model: ModelConfig, *, max_batch_size: int, max_sequence_length: int, dtype: str, attention: str = "native"
) -> KVCacheConfig:
    """Return the cache that an engine of ``model`` runs on, in the dtype that it computes in and the layout of its attention."""
    layer = KVLayerConfig(num_kv_heads=model.num_kv_heads, head_dim=model.head_dim)
    return KVCacheConfig(
        layers=(layer,) * model.num_layers,
        max_batch_size=max_batch_size,
        max_sequence_length=max_sequence_length,
        dtype=dtype,
        layout=cache_layout(attention),
    )


def decoder_tensors(model: ModelConfig, cache: KVCacheConfig, names: TensorNames) -> tuple[TensorSpec, ...]:
    """Return the inputs, then the outputs, of an engine of ``model`` over ``cache``: one tensor a layer where that is COMBINED."""
    inputs = [
        TensorSpec.input(names.input_ids, (-1, -1), "int32"),
        TensorSpec.input(names.kvcache_start_index, (-1,), "int32"),
        TensorSpec.input(names.last_token_ids, (-1, 1), "int32"),
    ]
    outputs = []
    combined = cache.layout is KVLayout.COMBINED
    for index, layer in enumerate(cache.layers):
        shape = (-1, *((2,) if combined else ()), layer.num_kv_heads, cache.max_sequence_length, layer.head_dim)
        for before, after in names.layer_pairs(index, combined=combined):
            inputs.append(TensorSpec.input(before, shape, cache.dtype))
            outputs.append(TensorSpec.output(after, shape, cache.dtype, alias=before))
    return (*inputs, *outputs, TensorSpec.output(names.logits, (-1, model.vocab_size), "float32"))


def decoder_profiles(*, max_batch_size: int, max_prefill_length: int) -> tuple[EngineProfile, EngineProfile]:
    """Return the profiles by index: 0 for prefill in chunks up to a limit, 1 for decode."""
    batch = {"min_batch": MIN_BATCH_SIZE, "max_batch": max_batch_size}
    return (
        EngineProfile(name="prefill", min_width=1, max_width=max_prefill_length, **batch),
        EngineProfile(name="decode", min_width=1, max_width=1, **batch),
    )
