"""Fields of ``config.json`` that most families share, as parts of a description."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.dtypes import MODEL_DTYPES
from trt_kvcache.errors import ConfigError
from trt_kvcache.memory.shapes import MAX_DIMENSION, MAX_LAYERS
from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.layer_config import AttentionConfig, LayerConfig, Mixer
from trt_kvcache.model.mlp_config import MlpConfig, RoutedMlpConfig
from trt_kvcache.model.model_config import ModelConfig
from trt_kvcache.model.norm_config import NormConfig
from trt_kvcache.model.recurrent_config import Mamba2Config
from trt_kvcache.model.rope import RopeConfig

#: Activations by their names in configurations.
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu2"}

#: RoPE fields that assign frequencies to the axes of an image (M-RoPE): in a text all axes have the same positions.
IMAGE_AXES = ("mrope_section", "mrope_interleaved")

FULL, SLIDING = "full_attention", "sliding_attention"


def num_layers(fields: ConfigFields) -> int:
    """Return the number of layers."""
    count = fields.integer("num_hidden_layers")
    if count > MAX_LAYERS:
        raise ConfigError(f"num_hidden_layers: expected at most {MAX_LAYERS}, got {count}.")
    return count


def norm(fields: ConfigFields, *, field: str = "rms_norm_eps", **options: Any) -> NormConfig:
    """Return the norm of all layers."""
    return NormConfig(epsilon=fields.number(field), **options)


def layer_norm(fields: ConfigFields, *, field: str, bias: bool) -> NormConfig:
    """Return the LayerNorm of all layers."""
    return norm(fields, field=field, centered=True, rounds_before_weight=False, bias=bias)


def rope(fields: ConfigFields, **options: Any) -> RopeConfig:
    """Return the RoPE of all layers."""
    return RopeConfig.from_dict(
        fields.data,
        max_position_embeddings=fields.integer("max_position_embeddings"),
        **options,
    )


def rope_of_layer_type(fields: ConfigFields, kind: str, *, theta: str) -> RopeConfig:
    """Return the RoPE of a layer type. Older files have one theta field per type, ``theta``; their scaling belongs to full attention."""
    given = fields.get("rope_parameters")
    if given and not (isinstance(given, Mapping) and set(given) <= {FULL, SLIDING}):
        raise ConfigError(f"rope_parameters: expected one object for {FULL} and one for {SLIDING}, got others.")
    config: dict[str, Any] = {"rope_theta": fields.number(theta), "rope_scaling": fields.get("rope_scaling") if kind == FULL else None}
    if given:
        config["rope_parameters"] = given.get(kind)
    return RopeConfig.from_dict(config, max_position_embeddings=fields.integer("max_position_embeddings"))


def attention(fields: ConfigFields, **options: Any) -> AttentionConfig:
    """Return attention with the usual fields: a null ``num_key_value_heads`` means as many K/V heads as query heads."""
    heads = fields.integer("num_attention_heads")
    return AttentionConfig(
        num_heads=heads, num_kv_heads=fields.integer("num_key_value_heads", heads), head_dim=_head_dim(fields, heads), **options
    )


def mlp(fields: ConfigFields, *, activation_field: str = "hidden_act", size_field: str = "intermediate_size", **options: Any) -> MlpConfig:
    """Return an MLP: a gated one without biases unless the options say otherwise."""
    activation = fields.get(activation_field)
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise ConfigError(f"{activation_field}: {short_repr(activation)} is not supported. Supported: {', '.join(_ACTIVATIONS)}.")
    return MlpConfig(intermediate_size=fields.integer(size_field), activation=_ACTIVATIONS[activation], **options)


def silu_convolution(fields: ConfigFields, name: str = "hidden_act") -> None:
    """Refuse a convolution of a recurrent layer with another activation than SiLU."""
    if fields.get(name) not in ("silu", "swish"):
        raise fields.refusal(name, "silu, the activation of the convolutions of layers with states")


def mamba2(fields: ConfigFields, *, width: str | None = None, **options: Any) -> Mamba2Config:
    """Return the Mamba-2 of all layers from the fields ``mamba_*``; ``mamba_d_head`` may be ``"auto"``.

    ``width``: name of a field with the elements of all heads, which are ``mamba_expand * hidden_size`` without it.
    """
    silu_convolution(fields)
    name, heads = width if width is not None and width in fields else "mamba_expand * hidden_size", fields.integer("mamba_n_heads")
    inner = fields.integer(name) if name == width else fields.integer("mamba_expand") * fields.integer("hidden_size")
    if inner % heads:
        raise ConfigError(f"mamba_n_heads: expected a divisor of {name} = {inner}, got {heads}.")
    if fields.get("mamba_d_head") not in ("auto", inner // heads):
        raise fields.refusal("mamba_d_head", f"{inner // heads}, which is {name} / mamba_n_heads, or auto")
    return Mamba2Config(
        num_heads=heads,
        head_dim=inner // heads,
        state_size=fields.integer("mamba_d_state"),
        num_groups=fields.integer("mamba_n_groups"),
        kernel=fields.integer("mamba_d_conv"),
        conv_bias=fields.flag("mamba_conv_bias", True),
        bias=fields.flag("mamba_proj_bias", False),
        **dt_limits(fields),
        **{"norm": norm(fields), **options},
    )


def dt_limits(fields: ConfigFields) -> dict[str, Any]:
    """Return the limits of Mamba-2's time step, from ``time_step_limit``; null or infinity is no limit."""
    given = fields.get("time_step_limit")
    if given is None:
        return {"dt_min": 0.0, "dt_max": None}
    low, high = map(_float_of_transformers, given) if isinstance(given, list) and len(given) == 2 else (None, None)
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (low, high))
    if low is None or high is None or not numbers or not 0 <= low <= high or not low <= sys.float_info.max:
        raise fields.refusal("time_step_limit", "two numbers, 0 <= smallest <= largest")
    return {"dt_min": float(low), "dt_max": float(high) if high <= sys.float_info.max else None}


def _float_of_transformers(value: Any) -> Any:
    """Return infinity or NaN for the text that transformers 5 writes for it; any other value unchanged."""
    if isinstance(value, dict) and value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(value["__float__"])
    return value


def softcap(fields: ConfigFields, name: str) -> float | None:
    """Return a soft cap, or None for a null field."""
    return fields.number(name) if name in fields else None


def layer_types(fields: ConfigFields, default: Sequence[str], *, known: Sequence[str] = (FULL, SLIDING)) -> tuple[str, ...]:
    """Return the type of each layer, such as full attention or sliding window, from ``layer_types`` or the default."""
    given = fields.get("layer_types") or list(default)
    if not isinstance(given, list):
        raise fields.refusal("layer_types", "a list of names")
    other = [kind for kind in given if kind not in known]
    if other:
        raise ConfigError(f"layer_types: {other[0] if isinstance(other[0], str) else short_repr(other[0])} is not supported.")
    if len(given) != len(default):
        raise ConfigError(f"layer_types: expected {len(default)} as num_hidden_layers says, got {len(given)}.")
    return tuple(given)


def layer_indices(fields: ConfigFields, name: str) -> tuple[int, ...] | None:
    """Return the layers whose indices a field lists; None if it is absent."""
    count, given = num_layers(fields), fields.get(name)
    if given is None:
        return None
    listed = given if isinstance(given, list) else [None]
    if any(isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < count for index in listed):
        raise fields.refusal(name, f"a list of indices of layers, from 0 to {count - 1}")
    return tuple(listed)


def windows_from_layer(fields: ConfigFields) -> list[int | None]:
    """Return the window of each layer: from ``max_window_layers`` on, if ``use_sliding_window`` is true."""
    first = fields.count("max_window_layers", 0)
    return windows(fields, [layer >= first for layer in range(num_layers(fields))])


def windows(fields: ConfigFields, has_window: Sequence[bool]) -> list[int | None]:
    """Return the window of each layer by ``layer_types``, or else by ``has_window``, if ``use_sliding_window`` is true."""
    window = fields.integer("sliding_window") if fields.flag("use_sliding_window", False) and "sliding_window" in fields else None
    kinds = layer_types(fields, [SLIDING if window is not None and has else FULL for has in has_window])
    if window is None and SLIDING in kinds:  # in transformers the result depends on the implementation of attention
        given = ", ".join(f"{name} {short_repr(fields.get(name))}" for name in ("use_sliding_window", "sliding_window"))
        raise ConfigError(f"layer_types: expected {FULL} everywhere with {given}, got {SLIDING} in layer {kinds.index(SLIDING)}.")
    return [window if kind == SLIDING else None for kind in kinds]


def window_of_all(fields: ConfigFields) -> int | None:
    """Return the window of all layers, or None. Refuse ``layer_types`` that differ."""
    window = fields.integer("sliding_window") if "sliding_window" in fields else None
    kind = FULL if window is None else SLIDING
    if set(layer_types(fields, [kind] * num_layers(fields))) != {kind}:
        raise ConfigError(f"layer_types: expected {kind} everywhere with sliding_window {window}, got others.")
    return window


def window_of_layer_type(fields: ConfigFields, kind: str) -> int | None:
    """Return the window of a type of layers. Sliding-window layers need one: null is refused."""
    if kind == SLIDING and "sliding_window" not in fields:
        raise fields.refusal("sliding_window", f"a positive integer with {SLIDING} in layer_types")
    return fields.integer("sliding_window") if kind == SLIDING else None


def full_attention_only(fields: ConfigFields) -> None:
    """Refuse ``layer_types`` other than full attention, for families that have nothing else."""
    if SLIDING in layer_types(fields, [FULL] * num_layers(fields)):
        raise ConfigError(f"layer_types: {SLIDING} is not supported for model_type {fields.get('model_type')!r}.")


def pre_norm_layer(
    fields: ConfigFields, mixer: Mixer, mlp: MlpConfig | RoutedMlpConfig, *, before: NormConfig | None = None, **options: Any
) -> LayerConfig:
    """Return a layer with pre-norms of mixer and MLP, one for both in a parallel layer: :func:`norm`, unless ``before`` is another one."""
    before = before or norm(fields)
    return LayerConfig(mixer=mixer, mlp=mlp, input_norm=before, mlp_norm=None if options.get("parallel") else before, **options)


def model(fields: ConfigFields, family: str, layers: Sequence[LayerConfig], *, tied: bool | None = None, **options: Any) -> ModelConfig:
    """Return a model of these layers, with the fields that all families share."""
    return ModelConfig(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        layers=tuple(layers),
        final_norm=options.pop("final_norm", None) or norm(fields),
        max_position_embeddings=_max_positions(fields, layers),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False) if tied is None else tied,
        dtype=_dtype(fields),
        bos_token_id=_bos_token_id(fields),
        eos_token_ids=fields.token_ids("eos_token_id"),
        **options,
    )


def _head_dim(fields: ConfigFields, heads: int) -> int:
    """Return ``head_dim``; ``hidden_size / num_attention_heads`` if it is null or absent."""
    if "head_dim" in fields:
        return fields.integer("head_dim")
    hidden = fields.integer("hidden_size")
    if hidden % heads:
        raise ConfigError(f"hidden_size: expected a multiple of num_attention_heads={heads} where head_dim is absent, got {hidden}.")
    return hidden // heads


def _max_positions(fields: ConfigFields, layers: Sequence[LayerConfig]) -> int:
    """Return the context length: the field, or the larger context of dynamic NTK or YaRN."""
    positions = fields.integer("max_position_embeddings")
    ropes = {layer.mixer.rope for layer in layers if isinstance(layer.mixer, AttentionConfig)}
    scaled = [rope for rope in ropes if rope is not None and rope.kind in ("dynamic", "yarn")]
    stretched = max((rope.factor * rope.original_max_position_embeddings for rope in scaled), default=0)
    if stretched > MAX_DIMENSION:
        raise ConfigError(f"factor: expected at most {MAX_DIMENSION} positions after RoPE is scaled, got {stretched:g}.")
    return max(positions, int(stretched))


def _dtype(fields: ConfigFields) -> str:
    given = [fields.get(name) for name in ("dtype", "torch_dtype") if name in fields]
    if len(given) > 1 and given[0] != given[1]:
        raise ConfigError(f"dtype and torch_dtype: expected one value, got {short_repr(given[0])} and {short_repr(given[1])}.")
    dtype = given[0] if given else None
    if dtype not in MODEL_DTYPES:
        raise ConfigError(f"dtype: {short_repr(dtype)} is not supported. Supported: weights in {', '.join(MODEL_DTYPES)}.")
    return str(dtype)


def _bos_token_id(fields: ConfigFields) -> int | None:
    ids = fields.token_ids("bos_token_id")
    if len(ids) > 1:
        raise fields.refusal("bos_token_id", "one token id")
    return ids[0] if ids else None
