"""Inputs, outputs and optimisation profiles of the engines that this package builds, for builder, engine folder and inspection."""

from collections.abc import Sequence

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
    """Return the configuration of the cache that an engine of ``model`` runs on.

    Parameters
    ----------
    model : ModelConfig
        Configuration of the model.
    max_batch_size : int
        Slots, B.
    max_sequence_length : int
        Tokens that a slot can hold, S.
    dtype : str
        What the engine computes in; the cache has the same.
    attention : str
        The variant of attention, which decides the layout.

    Returns
    -------
    KVCacheConfig
        One attention layer for each layer of the model, all with the model's K/V heads and head dimension. Nothing is allocated.
    """
    layer = KVLayerConfig(num_kv_heads=model.num_kv_heads, head_dim=model.head_dim)
    return KVCacheConfig(
        layers=(layer,) * model.num_layers,
        max_batch_size=max_batch_size,
        max_sequence_length=max_sequence_length,
        dtype=dtype,
        layout=cache_layout(attention),
    )


def decoder_tensors(model: ModelConfig, cache: KVCacheConfig, names: TensorNames) -> tuple[TensorSpec, ...]:
    """Return the inputs and outputs of an engine.

    Parameters
    ----------
    model : ModelConfig
        Configuration of the model.
    cache : KVCacheConfig
        The cache that the engine runs on. In the COMBINED layout a layer has one cache tensor, else one for K and one for V.
    names : TensorNames
        Names of the engine's inputs and outputs.

    Returns
    -------
    tuple of TensorSpec
        The inputs, then the outputs; ``-1`` for sizes that are known at run time only.
    """
    inputs = [
        TensorSpec.input(names.input_ids, (-1, -1), "int32"),
        TensorSpec.input(names.kvcache_start_index, (-1,), "int32"),
        TensorSpec.input(names.last_token_ids, (-1, 1), "int32"),
    ]
    outputs = []
    combined = cache.layout is KVLayout.COMBINED
    for index, layer in enumerate(cache.layers):
        shape = (-1, *((2,) if combined else ()), layer.num_kv_heads, cache.max_sequence_length, layer.head_dim)
        for past, present in names.layer_pairs(index, combined=combined):
            inputs.append(TensorSpec.input(past, shape, cache.dtype))
            outputs.append(TensorSpec.output(present, shape, cache.dtype, alias=past))
    return (*inputs, *outputs, TensorSpec.output(names.logits, (-1, model.vocab_size), "float32"))


def decoder_profiles(*, max_batch_size: int, max_prefill_length: int) -> tuple[EngineProfile, EngineProfile]:
    """Return the optimisation profiles of an engine.

    Parameters
    ----------
    max_batch_size : int
        Slots, B.
    max_prefill_length : int
        Most new tokens per slot in one enqueue.

    Returns
    -------
    prefill : EngineProfile
        Profile 0: 1 to ``max_prefill_length`` new tokens per slot.
    decode : EngineProfile
        Profile 1: one new token per slot. With one slot it accepts two slots as well: of a profile whose shapes are all fixed, TensorRT
        keeps a copy of the weights of its own, which makes the plan half as large again.

    Examples
    --------
    >>> prefill, decode = decoder_profiles(max_batch_size=8, max_prefill_length=512)
    >>> prefill.accepts(batch=8, width=512), decode.accepts(batch=8, width=2)
    (True, False)
    """
    return (
        EngineProfile(name="prefill", min_batch=MIN_BATCH_SIZE, max_batch=max_batch_size, min_width=1, max_width=max_prefill_length),
        EngineProfile(name="decode", min_batch=MIN_BATCH_SIZE, max_batch=max(2, max_batch_size), min_width=1, max_width=1),
    )


def shape_at(shape: Sequence[int], batch: int, width: int) -> tuple[int, ...]:
    """Return the shape of a tensor in an enqueue of ``batch`` slots by ``width`` new tokens.

    Parameters
    ----------
    shape : sequence of int
        The first ``-1`` is the batch, the second one the width.
    batch, width : int
        Slots, and new tokens per slot.

    Returns
    -------
    tuple of int
        ``shape`` with ``batch`` in place of the first ``-1`` and ``width`` in place of the second; other sizes stay.

    Examples
    --------
    >>> shape_at((-1, -1, 4, 64), batch=8, width=1)
    (8, 1, 4, 64)
    """
    sizes = iter((batch, width))
    return tuple(next(sizes) if size < 0 else size for size in shape)
