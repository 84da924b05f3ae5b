"""Checking the fields of an engine's ``config.json`` against each other, so that an altered file is refused before the engine is opened."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from trt_kvcache._util.checks import int_in_range, one_of
from trt_kvcache.checkpoint.quantized.quantization import Quantization
from trt_kvcache.dtypes import MODEL_DTYPES
from trt_kvcache.engine.adapter_inputs import AdapterInputs
from trt_kvcache.engine.attention_variants import ATTENTION_VARIANTS, why_not_native
from trt_kvcache.engine.decoder_cache import decoder_cache_config
from trt_kvcache.engine.decoder_profiles import decoder_profiles
from trt_kvcache.engine.decoder_tensors import decoder_tensors
from trt_kvcache.engine.flavours import FLAVOURS
from trt_kvcache.engine.quantized_kv import QuantizedKV
from trt_kvcache.engine_folder.config import EngineFolderConfig
from trt_kvcache.engine_folder.v_outputs import v_outputs
from trt_kvcache.errors import EngineError
from trt_kvcache.ops.segments import can_replace


def check_consistency(config: EngineFolderConfig) -> None:
    """Check the fields of a configuration against each other: model and cache sizes determine the others."""
    cache, names = config.cache, config.names
    _check_attention(config)
    quantized = cache.kv is not None and cache.kv.has_scales
    if quantized is not (config.computed_dtype is not None):
        raise EngineError(
            f"computed_dtype: expected {'one' if quantized else 'none'} for K and V in {cache.dtype}, got {config.computed_dtype}."
        )
    one_of("computed_dtype", config.dtype, MODEL_DTYPES, error=EngineError)
    if config.plugin_library is not None and (config.attention_variant != "plugin" or config.segments is not None):
        raise EngineError(f"plugin_library: expected none without plugin layers ({config.attention_variant} attention), got one.")
    record = config.checkpoint
    if bool(record.adapter) is not bool(record.adapter_fingerprint):
        raise EngineError(
            f"checkpoint: expected adapter and adapter_fingerprint together, got {record.adapter!r} and {record.adapter_fingerprint!r}."
        )
    if config.checkpoint.quantize:
        Quantization.parse(config.checkpoint.quantize)
    expected = decoder_cache_config(
        config.model,
        max_batch_size=cache.max_batch_size,
        max_sequence_length=cache.max_sequence_length,
        dtype=config.dtype,
        attention=config.attention_variant,
        quantized=QuantizedKV.of(cache.kv),
    )
    if cache != expected:
        field, wanted, got = _difference(expected.to_dict(), cache.to_dict())
        raise EngineError(f"kv_cache{field}: expected {wanted!s:.300} for this model, got {got!s:.300}.")
    one_of("tensorrt.flavour", config.tensorrt_flavour, FLAVOURS[1:], error=EngineError)
    _check_profiles(config)
    wanted_tensors = decoder_tensors(config.model, cache, names, max_logits_per_slot=config.max_logits_per_slot)
    if len(wanted_tensors) != len(config.tensors):
        raise EngineError(f"tensors: expected {len(wanted_tensors)} for this model and kv_cache, got {len(config.tensors)}.")
    for wanted_spec, spec in zip(wanted_tensors, config.tensors, strict=True):
        if wanted_spec != spec:
            raise EngineError(
                f"tensor `{spec.name}`: expected {wanted_spec.describe()} for this model and kv_cache, got {spec.describe():.300}."
            )
    _check_segments(config)
    _check_v_outputs(config)
    _check_adapters(config)
    if config.max_embeddings and config.model.per_layer_embedding is not None:
        raise EngineError(f"max_embeddings: expected 0 for a model with per-layer embeddings, got {config.max_embeddings}.")
    _check_draft_tree(config)
    _check_hidden_states(config)


def _difference(expected: Any, got: Any) -> tuple[str, Any, Any]:
    """Return the first place where two JSON values differ, such as ``".mamba.conv_dtype"``, and their values there."""
    if isinstance(expected, dict) and isinstance(got, dict) and expected.keys() == got.keys():
        for name, value in expected.items():
            if value != got[name]:
                place, *values = _difference(value, got[name])
                return f".{name}{place}", *values
    return "", expected, got


def _check_v_outputs(config: EngineFolderConfig) -> None:
    """Check that V of each plugin layer is an output, or of none."""
    if not config.v_outputs:
        return
    if (config.attention_variant, config.tensorrt_flavour) != ("plugin", "tensorrt"):
        raise EngineError(f"v_outputs: expected none of {config.tensorrt_flavour} and {config.attention_variant} attention, got some.")
    expected = v_outputs(config.model, config.dtype)
    if config.v_outputs != expected:
        wanted, got = (", ".join(spec.describe() for spec in specs) for specs in (expected, config.v_outputs))
        raise EngineError(f"v_outputs: expected {wanted:.300} for this model, got {got:.300}.")


def _check_adapters(config: EngineFolderConfig) -> None:
    """Check that the inputs for adapters are of linear layers of the model, each once and in its order."""
    found = config.adapters
    if found is None:
        return
    expected = AdapterInputs.of(config.model, rank=found.rank, modules=found.modules, error=EngineError)
    if found != expected or not found.modules:
        raise EngineError(f"adapters: expected modules {', '.join(expected.modules)} for this model, got {', '.join(found.modules):.300}.")
    if config.segments is not None or config.checkpoint.adapter:
        got = "segments" if config.segments is not None else "a merged adapter"
        raise EngineError(f"adapters: expected none with {got}, got inputs for rank {found.rank}.")


def _check_hidden_states(config: EngineFolderConfig) -> None:
    """Check that a draft head returns hidden states, that a model returns them for a draft head, and that there are no segments."""
    found, is_head = config.hidden_layers is not None, config.model.hidden_inputs_width > 0
    if found is not (is_head or bool(config.draft_head)):
        what = "of a draft head" if is_head else "for one" if config.draft_head else "without one"
        raise EngineError(f"hidden_layers: expected {'none' if found else 'some'} {what}, got {config.hidden_layers}.")
    if is_head and config.draft_head:
        raise EngineError(f"draft_head: expected none of a draft head, got {config.draft_head:.30}.")
    if found and config.segments is not None:
        raise EngineError(f"hidden_layers: expected none with segments, got {config.hidden_layers}.")


def _check_draft_tree(config: EngineFolderConfig) -> None:
    """Check that the engine can have the input for trees, and returns the logits of all tokens of a tree."""
    if config.draft_tree is None:
        return
    why = "recurrent states" if config.model.recurrent_layers else None
    if config.attention_variant != "plugin" or config.segments is not None or config.plugin_library is not None:
        why = "segments" if config.segments else "a plugin library" if config.plugin_library else f"{config.attention_variant} attention"
    if why is not None:
        raise EngineError(f"draft_tree: expected none with {why}, got {config.draft_tree}.")
    if config.draft_tree > config.max_logits_per_slot:
        raise EngineError(
            f"draft_tree: expected at most {config.max_logits_per_slot}, the logits of a slot in profiles, got {config.draft_tree}."
        )


def _check_segments(config: EngineFolderConfig) -> None:
    """Check that the stages are the stages of the model, and that the plans fill the file of plans."""
    if config.segments is None:
        return
    if (config.attention_variant, config.tensorrt_flavour) != ("plugin", "tensorrt_rtx"):
        raise EngineError(f"segments: expected none of {config.tensorrt_flavour} and {config.attention_variant} attention, got some.")
    stages = config.stages_of_model()
    if len(stages) != len(config.segments.stages):
        raise EngineError(f"segments.steps: expected {len(stages)} for this model and kv_cache, got {len(config.segments.stages)}.")
    for index, (wanted, got) in enumerate(zip(stages, config.segments.stages, strict=True)):
        if not can_replace(got, wanted):
            raise EngineError(f"segments.steps[{index}]: expected {wanted!s:.300} for this model and kv_cache, got {got!s:.300}.")
    _, end = config.segments.spans[-1]
    if end != config.plan.nbytes:
        raise EngineError(f"plan.nbytes: expected {end}, the end of the last segment, got {config.plan.nbytes}.")


def _check_attention(config: EngineFolderConfig) -> None:
    """Check that each attention layer of the model is listed, in order, and that plugin attention is not mixed with others."""
    one_of("attention_variant", config.attention_variant, ATTENTION_VARIANTS, error=EngineError)
    expected = config.model.attention_indices
    if len(config.attention) != len(expected):
        raise EngineError(f"attention: expected {len(expected)} layers for this model, got {len(config.attention)}.")
    if config.attention and config.attention_variant != config.attention[0].variant:
        raise EngineError(
            f"attention_variant: expected {config.attention[0].variant!s:.30} as in attention, got {config.attention_variant}."
        )
    for index, (layer, wanted) in enumerate(zip(config.attention, expected, strict=True)):
        if layer.layer != wanted:
            raise EngineError(f"attention[{index}].layer: expected {wanted}, got {layer.layer}.")
        one_of(f"attention[{index}].variant", layer.variant, ATTENTION_VARIANTS, error=EngineError)
        if (layer.variant == "plugin") is not (config.attention_variant == "plugin"):
            raise EngineError(
                f"attention[{index}].variant: expected {config.attention_variant} as in the first layer, got {layer.variant}."
            )
    obstacle = why_not_native(config.model, config.cache.max_sequence_length)
    if obstacle is not None and any(layer.variant == "native" for layer in config.attention):
        raise EngineError(f"attention: expected mask or plugin, got native: {obstacle}.")


def _check_profiles(config: EngineFolderConfig) -> None:
    """Check that the profiles are the profiles of an engine of this package; only width and logits of the first are free, up to S."""
    if not config.profiles:
        raise EngineError("profiles: expected 2, for prefill and decode, got 0.")
    first = config.profiles[0]
    width = int_in_range("profiles[0].max_width", first.max_width, 1, config.cache.max_sequence_length, error=EngineError)
    logits = int_in_range("profiles[0].max_logits", first.max_logits, 1, width, error=EngineError)
    expected = decoder_profiles(
        max_batch_size=config.cache.max_batch_size, max_prefill_length=width, max_logits_per_slot=logits, draft_tree=config.draft_tree
    )
    if len(config.profiles) != len(expected):
        for_what = "prefill and decode" if len(expected) == 2 else "prefill, decode and verification of drafts"
        raise EngineError(f"profiles: expected {len(expected)}, for {for_what}, got {len(config.profiles)}.")
    for wanted, got in zip(map(asdict, expected), map(asdict, config.profiles), strict=True):
        for name, value in wanted.items():
            if got[name] != value:
                source = " as in kv_cache" if name == "max_batch" else ""
                raise EngineError(f"profile {wanted['name']}: expected {name} {value}{source}, got {got[name]}.")
