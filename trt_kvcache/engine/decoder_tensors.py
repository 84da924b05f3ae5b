"""Inputs, outputs and optimisation profiles of the engines that this package builds, for builder, engine folder and inspection."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, Literal

from trt_kvcache._util.checks import int_in_range
from trt_kvcache.cache.config import KVCacheConfig
from trt_kvcache.cache.hybrid_config import HybridCacheConfig, LayerType
from trt_kvcache.cache.kv_layer_config import KVLayerConfig
from trt_kvcache.cache.layout import KVLayout
from trt_kvcache.cache.mamba_config import MambaCacheConfig
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

#: What an engine of a model runs on: K and V alone, or with the states of recurrent layers.
DecoderCacheConfig = KVCacheConfig | HybridCacheConfig

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
        What the engine computes in; the cache has the same unless it is quantized.
    attention : str
        The variant of attention, which decides the layout.
    quantized : QuantizedKV, optional
        How K and V are quantized; plugin attention alone takes them so.

    Returns
    -------
    KVCacheConfig
        One attention layer for each layer of the model, with its K/V heads and head dimension. A layer with a window has as many rows as
        the others. Nothing is allocated.

    Raises
    ------
    ConfigError
        The model has layers with states: see :func:`decoder_cache_config`.
    """
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
    """Return the configuration of the cache that an engine of ``model`` runs on, whatever its layers keep.

    Parameters
    ----------
    model : ModelConfig
        Configuration of the model.
    max_batch_size : int
        Slots, B.
    max_sequence_length : int
        Tokens that a slot can hold, S.
    dtype : str
        What the engine computes in; conv states have the same, and K and V unless they are quantized. Recurrent states are float32.
    attention : str
        The variant of attention, which decides the layout of K and V.
    quantized : QuantizedKV, optional
        How K and V are quantized; plugin attention alone takes them so.

    Returns
    -------
    KVCacheConfig or HybridCacheConfig
        :func:`cache_config` for a model of attention layers. Else a layer for each one of the model that keeps something, with two buffers
        of states: a step that is not committed has then left those before it as they were.

    Raises
    ------
    ConfigError
        The layers with states differ in their states.
    """
    sizes = {"max_batch_size": max_batch_size, "max_sequence_length": max_sequence_length}
    if not model.recurrent_layers:
        return cache_config(model, **sizes, dtype=dtype, attention=attention, quantized=quantized)
    mixers = [layer.mixer for layer in model.layers if layer.mixer is not None]
    kinds = [LayerType.ATTENTION if isinstance(mixer, AttentionConfig) else LayerType.MAMBA for mixer in mixers]
    kv = _kv_config(model, **sizes, dtype=dtype, attention=attention, quantized=quantized) if model.attention_layers else None
    return HybridCacheConfig(layer_types=tuple(kinds), kv=kv, mamba=_states_config(model, **sizes, dtype=dtype))


def decoder_cache_from_dict(data: Mapping[str, Any]) -> DecoderCacheConfig:
    """Return the configuration of a cache that its ``to_dict`` wrote.

    Parameters
    ----------
    data : mapping
        Field names and JSON values.

    Returns
    -------
    KVCacheConfig or HybridCacheConfig
        The latter if the layers have kinds.

    Raises
    ------
    ConfigError
        A field is missing, unknown or wrong.
    """
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
    """Return what a layer with states keeps of each slot.

    Parameters
    ----------
    mixer : ShortConvConfig, Mamba2Config or GatedDeltaNetConfig
        Mixer of a layer.

    Returns
    -------
    dict of str to int
        Fields of a :class:`~trt_kvcache.cache.mamba_config.MambaCacheConfig`.
    """
    convolution = {"conv_dim": mixer.channels, "conv_kernel": mixer.kernel}
    if mixer.state_shape is None:
        return convolution
    return {**convolution, **dict(zip(("num_heads", "head_dim", "state_size"), mixer.state_shape, strict=True))}


def cache_layer(mixer: AttentionConfig) -> KVLayerConfig:
    """Return what attention keeps of each token.

    Parameters
    ----------
    mixer : AttentionConfig
        Attention of a layer.

    Returns
    -------
    KVLayerConfig
        Its K/V heads and head dimension.
    """
    return KVLayerConfig(num_kv_heads=mixer.num_kv_heads, head_dim=mixer.head_dim)


def decoder_tensors(
    model: ModelConfig, cache: DecoderCacheConfig, names: TensorNames, *, max_logits_per_slot: int = 1
) -> tuple[TensorSpec, ...]:
    """Return the inputs and outputs of an engine.

    Parameters
    ----------
    model : ModelConfig
        Configuration of the model.
    cache : KVCacheConfig or HybridCacheConfig
        The cache that the engine runs on. In the COMBINED layout a layer has one cache tensor, else one for K and one for V; and a tensor
        of scales if it is quantized. States that are updated in place share memory; those with two buffers do not.
    names : TensorNames
        Names of the engine's inputs and outputs.
    max_logits_per_slot : int
        Most new tokens per slot whose logits one enqueue returns. With 1, ``last_token_ids`` is ``[B, 1]`` and ``logits`` ``[B, vocab]``;
        with more they are ``[B, m]`` and ``[B, m, vocab]``, with m from 1 to that number.

    Returns
    -------
    tuple of TensorSpec
        The inputs, then the outputs; ``-1`` for sizes that are known at run time only.
    """
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
    """Return the tensors of K and V of a layer.

    Parameters
    ----------
    kv : KVCacheConfig
        The attention layers of the engine's cache.
    names : TensorNames
        Names of the engine's inputs and outputs.
    index : int
        Index of the layer among those with attention.

    Returns
    -------
    inputs, outputs : list of TensorSpec
        One cache tensor in the COMBINED layout, else one for K and one for V; then those of :func:`scale_tensors`.
    """
    layer, combined = kv.layers[index], kv.layout is KVLayout.COMBINED
    shape = (-1, *((2,) if combined else ()), layer.num_kv_heads, kv.max_sequence_length, layer.head_dim)
    pairs = names.layer_pairs(index, combined=combined)
    scales = scale_tensors(kv, names, index)
    return (
        [*(TensorSpec.input(past, shape, kv.dtype) for past, _ in pairs), *scales[:1]],
        [*(TensorSpec.output(present, shape, kv.dtype, alias=past) for past, present in pairs), *scales[1:]],
    )


def scale_tensors(kv: KVCacheConfig, names: TensorNames, index: int) -> tuple[TensorSpec, ...]:
    """Return the tensors of the scales of a layer.

    Parameters
    ----------
    kv : KVCacheConfig
        The attention layers of the engine's cache.
    names : TensorNames
        Names of the engine's inputs and outputs.
    index : int
        Index of the layer among those with attention.

    Returns
    -------
    tuple of TensorSpec
        An input ``[2, H]`` of static scales; an input ``[B, 2, H, S']`` of those by token, and the output that shares its memory; or
        nothing if K and V are not quantized.
    """
    if not kv.has_scales:
        return ()
    past, present = names.scales_pair(index)
    heads = kv.layers[index].num_kv_heads
    if not kv.scales_by_token:
        return (TensorSpec.input(past, (2, heads), "float32"),)
    shape = (-1, 2, heads, saved_scales(kv.max_sequence_length))
    return TensorSpec.input(past, shape, "float32"), TensorSpec.output(present, shape, "float32", alias=past)


def state_tensors(mamba: MambaCacheConfig, names: TensorNames, index: int) -> dict[StateKind, tuple[TensorSpec, TensorSpec]]:
    """Return the tensors of the states of a layer.

    Parameters
    ----------
    mamba : MambaCacheConfig
        The states of the engine's cache.
    names : TensorNames
        Names of the engine's inputs and outputs.
    index : int
        Index of the layer among those with states.

    Returns
    -------
    dict of StateKind to tuple of TensorSpec
        The input before a step and the output after it, of each kind of state that the layers have: recurrent states first.
    """
    found = {}
    for kind, storage in state_storages(mamba).items():
        past, present = names.state_pair(kind, index)
        shape = (-1, *storage.slot_shape)
        output = TensorSpec.output(present, shape, storage.dtype, alias=None if mamba.ping_pong else past)
        found[kind] = (TensorSpec.input(past, shape, storage.dtype), output)
    return found


def indices_in_kind(model: ModelConfig) -> tuple[int | None, ...]:
    """Return which of the caches a layer has.

    Parameters
    ----------
    model : ModelConfig
        Configuration of the model.

    Returns
    -------
    tuple of int or None
        For each layer its index among the layers of attention, or among those with states; None without a mixer.
    """
    attention, recurrent = count(), count()
    return tuple(
        None if layer.mixer is None else next(attention if isinstance(layer.mixer, AttentionConfig) else recurrent)
        for layer in model.layers
    )


def logits_tensors(model: ModelConfig, names: TensorNames, *, max_logits_per_slot: int) -> tuple[TensorSpec, TensorSpec]:
    """Return the input that says of which new tokens the logits are wanted, and the output of these logits.

    Parameters
    ----------
    model : ModelConfig
        Configuration of the model.
    names : TensorNames
        Names of the engine's inputs and outputs.
    max_logits_per_slot : int
        As for :func:`decoder_tensors`.

    Returns
    -------
    last_token_ids, logits : TensorSpec
        As for :func:`decoder_tensors`.
    """
    last, many = ((-1, 1), ()) if max_logits_per_slot == 1 else ((-1, -1), (-1,))
    return (
        TensorSpec.input(names.last_token_ids, last, "int32"),
        TensorSpec.output(names.logits, (-1, *many, model.vocab_size), "float32"),
    )


def check_logits_per_slot(wanted: int | Literal["all"]) -> int | Literal["all"]:
    """Return a number of logits per slot as it was asked for, checked as far as it can be without the length of a prefill.

    Parameters
    ----------
    wanted : int or "all"
        As a build or a session is asked for it.

    Returns
    -------
    int or "all"
        At least 1.

    Raises
    ------
    ConfigError
        It is neither.
    """
    if wanted == "all":
        return wanted
    if isinstance(wanted, str):
        raise ConfigError(f"max_logits_per_slot: expected a number of new tokens or 'all', got {wanted!r}.")
    return int_in_range("max_logits_per_slot", wanted, 1, error=ConfigError)


def logits_per_slot(wanted: int | Literal["all"], *, max_prefill_length: int) -> int:
    """Return how many new tokens per slot an engine is to have logits of in one enqueue.

    Parameters
    ----------
    wanted : int or "all"
        As a build or a session is asked for it.
    max_prefill_length : int
        Most new tokens per slot in one enqueue.

    Returns
    -------
    int
        From 1 to ``max_prefill_length``, which ``"all"`` stands for.

    Raises
    ------
    ConfigError
        It is out of range.
    """
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
    """Return how many new tokens per slot an engine without a plan has the logits of, where nobody asked for a number.

    Parameters
    ----------
    model : ModelConfig
        Configuration of the model.
    max_batch_size : int
        Slots, B.
    max_prefill_length : int
        Most new tokens per slot in one enqueue.

    Returns
    -------
    int
        2 to 64, so that texts can be scored; as many as take 64 MiB of logits. 1 if ``max_prefill_length`` is 1.

    Examples
    --------
    >>> from trt_kvcache.checkpoint import Checkpoint
    >>> with Checkpoint.open("examples/tiny-llama") as checkpoint:
    ...     [default_logits_per_slot(checkpoint.config, max_batch_size=slots, max_prefill_length=512) for slots in (1, 1024, 2**20)]
    [64, 51, 2]
    """
    fitting = _DEFAULT_LOGITS_NBYTES // (max_batch_size * model.vocab_size * itemsize("float32"))
    return min(max(fitting, 2), _DEFAULT_LOGITS_PER_SLOT, max_prefill_length)


def decoder_profiles(*, max_batch_size: int, max_prefill_length: int, max_logits_per_slot: int = 1) -> tuple[EngineProfile, ...]:
    """Return the optimisation profiles of an engine.

    Parameters
    ----------
    max_batch_size : int
        Slots, B.
    max_prefill_length : int
        Most new tokens per slot in one enqueue.
    max_logits_per_slot : int
        Most new tokens per slot whose logits one enqueue returns; at most ``max_prefill_length``.

    Returns
    -------
    prefill : EngineProfile
        Profile 0: 1 to ``max_prefill_length`` new tokens per slot, and the logits of 1 to ``max_logits_per_slot`` of them.
    decode : EngineProfile
        Profile 1: one new token per slot. With one slot it accepts two slots as well: of a profile whose shapes are all fixed, TensorRT
        keeps a copy of the weights of its own, which makes the plan half as large again.
    verify : EngineProfile
        Profile 2, where more logits than one per slot were asked for: up to 17 new tokens per slot, and the logits of all of them, for the
        verification of drafts. It is left out where it would equal the first one.

    Examples
    --------
    >>> prefill, decode = decoder_profiles(max_batch_size=8, max_prefill_length=512)
    >>> prefill.accepts(batch=8, width=512), decode.accepts(batch=8, width=2)
    (True, False)
    >>> profiles = decoder_profiles(max_batch_size=8, max_prefill_length=512, max_logits_per_slot=128)
    >>> [(profile.name, profile.max_width, profile.max_logits) for profile in profiles]
    [('prefill', 512, 128), ('decode', 1, 1), ('verify', 17, 17)]
    """
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


def step_shape(spec: TensorSpec, names: TensorNames, *, batch: int, width: int, logits: int) -> tuple[int, ...]:
    """Return the shape of an input or output of an engine in an enqueue.

    Parameters
    ----------
    spec : TensorSpec
        Of the engine, or of one of its segments.
    names : TensorNames
        Names of the engine's inputs and outputs.
    batch, width, logits : int
        Slots, new tokens per slot, and of how many of these the logits are wanted.

    Returns
    -------
    tuple of int
        The second size of ``last_token_ids`` and of ``logits``, where it is known at run time only, is ``logits``; of others ``width``.

    Examples
    --------
    >>> from trt_kvcache.engine.names import DEFAULT_NAMES
    >>> logits = TensorSpec.output("logits", (-1, -1, 320), "float32")
    >>> step_shape(logits, DEFAULT_NAMES, batch=8, width=17, logits=5)
    (8, 5, 320)
    """
    per_slot = logits if spec.name in (names.last_token_ids, names.logits) else width
    return shape_at(spec.shape, batch, per_slot)
