"""Inputs, outputs and optimisation profiles of the engines that this package builds, for builder, engine folder and inspection."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, Literal

from trt_kvcache._util.checks import int_in_range
from trt_kvcache.cache.config import DecoderCacheConfig, HybridCacheConfig, KVCacheConfig, LayerType, MambaCacheConfig
from trt_kvcache.cache.kv_layer_config import KVLayerConfig
from trt_kvcache.cache.layout import KVLayout
from trt_kvcache.cache.recurrent_states import StateKind, state_storages
from trt_kvcache.dtypes import itemsize
from trt_kvcache.engine.attention_variants import cache_layout
from trt_kvcache.engine.names import TensorNames
from trt_kvcache.engine.protocol import EngineProfile, TensorSpec
from trt_kvcache.engine.quantized_kv import QuantizedKV
from trt_kvcache.errors import ConfigError
from trt_kvcache.kernels.scale_views import saved_scales
from trt_kvcache.model import AttentionConfig, ModelConfig
from trt_kvcache.model.recurrent_config import RecurrentConfig

#: Slots in the smallest enqueue of every profile.
MIN_BATCH_SIZE = 1

#: Logits that an engine without a plan has room for: new tokens per slot at most, and bytes.
_DEFAULT_LOGITS_PER_SLOT = 64
_DEFAULT_LOGITS_NBYTES = 64 << 20

#: New tokens per slot that the profile for verifying drafts is tuned for: a token and a draft of 16.
VERIFY_WIDTH = 17


def cache_config(
    model: ModelConfig,
    *,
    max_batch_size: int,
    max_sequence_length: int,
    dtype: str,
    attention: str = "native",
    quantized: QuantizedKV | None = None,
) -> KVCacheConfig:
    """Return the configuration of the cache that an engine of ``model`` runs on."""
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
    """Return the configuration of the cache that an engine of ``model`` runs on, whatever its layers keep."""
    sizes = {"max_batch_size": max_batch_size, "max_sequence_length": max_sequence_length}
    if not model.recurrent_layers:
        return cache_config(model, **sizes, dtype=dtype, attention=attention, quantized=quantized)
    mixers = [layer.mixer for layer in model.layers if layer.mixer is not None]
    kinds = [LayerType.ATTENTION if isinstance(mixer, AttentionConfig) else LayerType.MAMBA for mixer in mixers]
    kv = _kv_config(model, **sizes, dtype=dtype, attention=attention, quantized=quantized) if model.attention_layers else None
    return HybridCacheConfig(layer_types=tuple(kinds), kv=kv, mamba=_states_config(model, **sizes, dtype=dtype))


def decoder_cache_from_dict(data: Mapping[str, Any]) -> DecoderCacheConfig:
    """Return the configuration of a cache that its ``to_dict`` wrote."""
    return HybridCacheConfig.from_dict(data) if "layer_types" in data else KVCacheConfig.from_dict(data)


def _kv_config(
    model: ModelConfig, *, max_batch_size: int, max_sequence_length: int, dtype: str, attention: str, quantized: QuantizedKV | None
) -> KVCacheConfig:
    layers = tuple(cache_layer(mixer) for mixer in model.attention_layers)
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
    """Return what a layer with states keeps of each slot."""
    convolution = {"conv_dim": mixer.channels, "conv_kernel": mixer.kernel}
    if mixer.state_shape is None:
        return convolution
    return {**convolution, **dict(zip(("num_heads", "head_dim", "state_size"), mixer.state_shape, strict=True))}


def cache_layer(mixer: AttentionConfig) -> KVLayerConfig:
    """Return what attention keeps of each token."""
    return KVLayerConfig(num_kv_heads=mixer.num_kv_heads, head_dim=mixer.head_dim)


def decoder_tensors(
    model: ModelConfig, cache: DecoderCacheConfig, names: TensorNames, *, max_logits_per_slot: int = 1
) -> tuple[TensorSpec, ...]:
    """Return the inputs and outputs of an engine."""
    last_token_ids, logits = logits_tensors(model, names, max_logits_per_slot=max_logits_per_slot)
    inputs = [
        TensorSpec.input(names.input_ids, (-1, -1), "int32"),
        TensorSpec.input(names.kvcache_start_index, (-1,), "int32"),
        last_token_ids,
    ]
    if cache.mamba is not None:
        inputs.append(TensorSpec.input(names.new_lengths, (-1,), "int32"))
    outputs = []
    if cache.kv is not None:
        for index in range(cache.kv.num_layers):
            before, after = kv_tensors(cache.kv, names, index)
            inputs += before
            outputs += after
    if cache.mamba is not None:
        for kind in state_storages(cache.mamba):
            for index in range(cache.mamba.num_layers):
                past_state, present_state = state_tensors(cache.mamba, names, index)[kind]
                inputs.append(past_state)
                outputs.append(present_state)
    return (*inputs, *outputs, logits)


def kv_tensors(kv: KVCacheConfig, names: TensorNames, index: int) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """Return the tensors of K and V of a layer."""
    layer, combined = kv.layers[index], kv.layout is KVLayout.COMBINED
    shape = (-1, *((2,) if combined else ()), layer.num_kv_heads, kv.max_sequence_length, layer.head_dim)
    pairs = names.layer_pairs(index, combined=combined)
    scales = scale_tensors(kv, names, index)
    return (
        [*(TensorSpec.input(past, shape, kv.dtype) for past, _ in pairs), *scales[:1]],
        [*(TensorSpec.output(present, shape, kv.dtype, alias=past) for past, present in pairs), *scales[1:]],
    )


def scale_tensors(kv: KVCacheConfig, names: TensorNames, index: int) -> tuple[TensorSpec, ...]:
    """Return the tensors of the scales of a layer."""
    if not kv.has_scales:
        return ()
    past, present = names.scales_pair(index)
    heads = kv.layers[index].num_kv_heads
    if not kv.scales_by_token:
        return (TensorSpec.input(past, (2, heads), "float32"),)
    shape = (-1, 2, heads, saved_scales(kv.max_sequence_length))
    return TensorSpec.input(past, shape, "float32"), TensorSpec.output(present, shape, "float32", alias=past)


def state_tensors(mamba: MambaCacheConfig, names: TensorNames, index: int) -> dict[StateKind, tuple[TensorSpec, TensorSpec]]:
    """Return the tensors of the states of a layer."""
    found = {}
    for kind, storage in state_storages(mamba).items():
        past, present = names.state_pair(kind, index)
        shape = (-1, *storage.slot_shape)
        output = TensorSpec.output(present, shape, storage.dtype, alias=None if mamba.ping_pong else past)
        found[kind] = (TensorSpec.input(past, shape, storage.dtype), output)
    return found


def indices_in_kind(model: ModelConfig) -> tuple[int | None, ...]:
    """Return which of the caches a layer has."""
    attention, recurrent = count(), count()
    return tuple(
        None if layer.mixer is None else next(attention if isinstance(layer.mixer, AttentionConfig) else recurrent)
        for layer in model.layers
    )


def logits_tensors(model: ModelConfig, names: TensorNames, *, max_logits_per_slot: int) -> tuple[TensorSpec, TensorSpec]:
    """Return the input that says of which new tokens the logits are wanted, and the output of these logits."""
    last, many = ((-1, 1), ()) if max_logits_per_slot == 1 else ((-1, -1), (-1,))
    return (
        TensorSpec.input(names.last_token_ids, last, "int32"),
        TensorSpec.output(names.logits, (-1, *many, model.vocab_size), "float32"),
    )


def check_logits_per_slot(wanted: int | Literal["all"]) -> int | Literal["all"]:
    """Return a number of logits per slot as it was asked for, checked as far as it can be without the length of a prefill."""
    if wanted == "all":
        return wanted
    if isinstance(wanted, str):
        raise ConfigError(f"max_logits_per_slot: expected a number of new tokens or 'all', got {wanted!r}.")
    return int_in_range("max_logits_per_slot", wanted, 1, error=ConfigError)


def logits_per_slot(wanted: int | Literal["all"], *, max_prefill_length: int) -> int:
    """Return how many new tokens per slot an engine is to have logits of in one enqueue."""
    found = check_logits_per_slot(wanted)
    if found == "all":
        return max_prefill_length
    if found > max_prefill_length:
        raise ConfigError(
            f"max_logits_per_slot: expected at most max_prefill_length={max_prefill_length}, got {found}. "
            "Longer prompts are scored in chunks."
        )
    return found


def default_logits_per_slot(model: ModelConfig, *, max_batch_size: int, max_prefill_length: int) -> int:
    """Return how many new tokens per slot an engine without a plan has the logits of, where nobody asked for a number."""
    fitting = _DEFAULT_LOGITS_NBYTES // (max_batch_size * model.vocab_size * itemsize("float32"))
    return min(max(fitting, 2), _DEFAULT_LOGITS_PER_SLOT, max_prefill_length)


def decoder_profiles(*, max_batch_size: int, max_prefill_length: int, max_logits_per_slot: int = 1) -> tuple[EngineProfile, ...]:
    """Return the optimisation profiles of an engine."""
    profile = partial(EngineProfile, min_batch=MIN_BATCH_SIZE, min_width=1)
    profiles = (
        profile(name="prefill", max_batch=max_batch_size, max_width=max_prefill_length, max_logits=max_logits_per_slot),
        profile(name="decode", max_batch=max(2, max_batch_size), max_width=1),
    )
    width = min(VERIFY_WIDTH, max_logits_per_slot)
    if not 1 < width < max_prefill_length:
        return profiles
    return (*profiles, profile(name="verify", max_batch=max_batch_size, max_width=width, max_logits=width))


def shape_at(shape: Sequence[int], batch: int, width: int) -> tuple[int, ...]:
    """Return the shape of a tensor in an enqueue of ``batch`` slots by ``width`` new tokens."""
    sizes = iter((batch, width))
    return tuple(next(sizes) if size < 0 else size for size in shape)


def step_shape(spec: TensorSpec, names: TensorNames, *, batch: int, width: int, logits: int) -> tuple[int, ...]:
    """Return the shape of an input or output of an engine in an enqueue."""
    per_slot = logits if spec.name in (names.last_token_ids, names.logits) else width
    return shape_at(spec.shape, batch, per_slot)
