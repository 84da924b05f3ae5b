"""``decoder_cache_config``: the configuration of the cache that an engine of a model runs on."""

from collections.abc import Mapping
from typing import Any

from trt_kvcache.cache.config import DecoderCacheConfig, HybridCacheConfig, KVCacheConfig, LayerType, MambaCacheConfig
from trt_kvcache.cache.kv_layer_config import KVLayerConfig
from trt_kvcache.engine.attention_variants import cache_layout
from trt_kvcache.engine.quantized_kv import QuantizedKV
from trt_kvcache.errors import ConfigError
from trt_kvcache.model import AttentionConfig, ModelConfig
from trt_kvcache.model.recurrent_config import RecurrentConfig


def cache_config(
    model: ModelConfig,
    *,
    max_batch_size: int,
    max_sequence_length: int,
    dtype: str,
    attention: str = "native",
    quantized: QuantizedKV | None = None,
) -> KVCacheConfig:
    """Return the cache of a model of attention layers. Layers with sliding windows have as many rows as others."""
    if model.recurrent_layers:
        raise ConfigError(f"{model.family}: expected a model that keeps K and V only, got one with states. Use decoder_cache_config.")
    sizes = {"max_batch_size": max_batch_size, "max_sequence_length": max_sequence_length}
    return _kv_config(model, **sizes, dtype=dtype, attention=attention, quantized=quantized)


def decoder_cache_config(
    model: ModelConfig,
    *,
    max_batch_size: int,
    max_sequence_length: int,
    dtype: str,
    attention: str = "native",
    quantized: QuantizedKV | None = None,
) -> DecoderCacheConfig:
    """Return the cache of any model. States have two buffers: a step that is not committed leaves the states before it.

    Conv states are in ``dtype``, K and V too unless they are quantized; recurrent states are float32.
    """
    sizes = {"max_batch_size": max_batch_size, "max_sequence_length": max_sequence_length}
    if not model.recurrent_layers:
        return cache_config(model, **sizes, dtype=dtype, attention=attention, quantized=quantized)
    kinds: list[LayerType] = []  # a layer with K and V and states is two layers of the cache
    for index in range(model.num_layers):
        kinds += [LayerType.ATTENTION] * (index in model.kv_indices) + [LayerType.MAMBA] * (index in model.recurrent_indices)
    kv = _kv_config(model, **sizes, dtype=dtype, attention=attention, quantized=quantized) if model.kv_layers else None
    return HybridCacheConfig(layer_types=tuple(kinds), kv=kv, mamba=_states_config(model, **sizes, dtype=dtype))


def decoder_cache_from_dict(data: Mapping[str, Any]) -> DecoderCacheConfig:
    """Return the configuration of a cache that its ``to_dict`` wrote."""
    return HybridCacheConfig.from_dict(data) if "layer_types" in data else KVCacheConfig.from_dict(data)


def _kv_config(
    model: ModelConfig, *, max_batch_size: int, max_sequence_length: int, dtype: str, attention: str, quantized: QuantizedKV | None
) -> KVCacheConfig:
    layers = tuple(cache_layer(mixer) for mixer in model.kv_layers)
    if quantized is not None:
        if attention != "plugin":
            raise ConfigError(
                f"kv_dtype: expected plugin attention for K and V in {quantized.dtype}, got {attention}: "
                "TensorRT's layers take no quantized K and V."
            )
        layers = quantized.layers(layers)
    return KVCacheConfig(
        layers=layers,
        max_batch_size=max_batch_size,
        max_sequence_length=max_sequence_length,
        dtype=dtype if quantized is None else quantized.dtype,
        layout=cache_layout(attention),
        scales=None if quantized is None else quantized.scales,
    )


def _states_config(model: ModelConfig, *, max_batch_size: int, max_sequence_length: int, dtype: str) -> MambaCacheConfig:
    sizes = [state_sizes(mixer) for mixer in model.recurrent_layers]
    if any(other != sizes[0] for other in sizes):
        raise ConfigError(f"{model.family}: expected equal states in all layers, got {sizes}.")
    limits = {"max_batch_size": max_batch_size, "max_sequence_length": max_sequence_length}
    fields: dict[str, Any] = {"num_layers": len(sizes), **limits, **sizes[0]}
    return MambaCacheConfig(**fields, conv_dtype=dtype, ping_pong=True)


def state_sizes(mixer: RecurrentConfig) -> dict[str, int]:
    """Return the sizes of the states of a layer: fields of ``MambaCacheConfig``."""
    convolution = {"conv_dim": mixer.channels, "conv_kernel": mixer.kernel}
    if mixer.state_shape is None:
        return convolution
    return {**convolution, **dict(zip(("num_heads", "head_dim", "state_size"), mixer.state_shape, strict=True))}


def cache_layer(mixer: AttentionConfig) -> KVLayerConfig:
    """Return the K/V heads and the head dimension of a layer."""
    return KVLayerConfig(num_kv_heads=mixer.num_kv_heads, head_dim=mixer.head_dim)
