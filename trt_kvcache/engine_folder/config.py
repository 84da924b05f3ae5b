"""``config.json`` of an engine folder: what was built, from what, by what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar, get_type_hints

from trt_kvcache._util.checks import int_in_range, one_of
from trt_kvcache._version import __version__
from trt_kvcache.cache.config import KVCacheConfig
from trt_kvcache.checkpoint import ModelConfig
from trt_kvcache.engine.attention_variants import ATTENTION_VARIANTS, AttentionLayerConfig
from trt_kvcache.engine.decoder_tensors import cache_config, decoder_profiles, decoder_tensors
from trt_kvcache.engine.flavours import FLAVOURS
from trt_kvcache.engine.names import TensorNames
from trt_kvcache.engine.protocol import EngineProfile, TensorSpec
from trt_kvcache.engine_folder.decoder_segments import decoder_stages
from trt_kvcache.engine_folder.records import CheckpointRecord, FileRecord, SegmentsRecord, tensor_from_dict
from trt_kvcache.errors import EngineError, KVCacheError
from trt_kvcache.ops.segments import can_replace

_Record = TypeVar("_Record")

#: Format of ``config.json`` that this package writes; it reads this one and older ones.
FORMAT = 2
_FIRST_WITH_SEGMENTS = 2


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything a runtime needs to know of an engine.

    Parameters
    ----------
    model : ModelConfig
        Of the checkpoint; its ``dtype`` is that of the stored weights.
    cache : KVCacheConfig
        The cache the engine runs on; its ``dtype`` is what the engine computes in.
    names : TensorNames
    tensors : tuple of TensorSpec
        Inputs, then outputs.
    profiles : tuple of EngineProfile
        For prefill, then for decode: :func:`trt_kvcache.engine.decoder_tensors.decoder_profiles`.
    attention : tuple of AttentionLayerConfig
        Per layer.
    tensorrt_flavour, tensorrt_version : str
    compute_capabilities : tuple of str, or None
        GPUs it was built for; None where none was named.
    plan : FileRecord
        The serialised engine; those of all segments, one after another.
    checkpoint : CheckpointRecord
    segments : SegmentsRecord or None
        None for an engine in one piece.
    package_version : str
        Of this package, at the build.
    """

    model: ModelConfig
    cache: KVCacheConfig
    names: TensorNames
    tensors: tuple[TensorSpec, ...]
    profiles: tuple[EngineProfile, ...]
    attention: tuple[AttentionLayerConfig, ...]
    tensorrt_flavour: str
    tensorrt_version: str
    compute_capabilities: tuple[str, ...] | None
    plan: FileRecord
    checkpoint: CheckpointRecord
    segments: SegmentsRecord | None = None
    package_version: str = __version__

    @property
    def dtype(self) -> str:
        """What the engine computes in."""
        return self.cache.dtype

    @property
    def attention_variant(self) -> str:
        """``"native"``, ``"mask"`` or ``"plugin"``."""
        return self.attention[0].variant

    @property
    def max_prefill_length(self) -> int:
        """Most new tokens per slot in one enqueue."""
        return max(profile.max_width for profile in self.profiles)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values that :meth:`from_dict` reads back."""
        return {
            "format": FORMAT,
            "producer": {"name": "trt-kvcache", "version": self.package_version},
            "tensorrt": {"flavour": self.tensorrt_flavour, "version": self.tensorrt_version},
            "compute_capabilities": None if self.compute_capabilities is None else list(self.compute_capabilities),
            "plan": asdict(self.plan),
            "checkpoint": asdict(self.checkpoint),
            "segments": None if self.segments is None else self.segments.to_dict(),
            "kv_cache": self.cache.to_dict(),
            "names": asdict(self.names),
            "profiles": [asdict(profile) for profile in self.profiles],
            "attention": [asdict(choice) for choice in self.attention],
            "model": self.model.to_dict(),
            "tensors": [{**asdict(spec), "shape": list(spec.shape), "mode": spec.mode.value} for spec in self.tensors],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EngineConfig:
        """Read what :meth:`to_dict` wrote.

        Raises
        ------
        EngineError
            A newer format, a field that is missing, unknown or of another type, or fields that disagree with each other.
        """
        _check_format(data)
        try:
            capabilities = data["compute_capabilities"]
            config = cls(
                model=ModelConfig.from_dict(data["model"]),
                cache=KVCacheConfig.from_dict(data["kv_cache"]),
                names=TensorNames(**data["names"]),
                tensors=tuple(map(tensor_from_dict, data["tensors"])),
                profiles=_records(EngineProfile, "profiles", data["profiles"]),
                attention=_records(AttentionLayerConfig, "attention", data["attention"], low=0),
                tensorrt_flavour=_typed("tensorrt.flavour", data["tensorrt"]["flavour"], str),
                tensorrt_version=_typed("tensorrt.version", data["tensorrt"]["version"], str),
                compute_capabilities=None if capabilities is None else _texts("compute_capabilities", capabilities),
                plan=_record(FileRecord, "plan", data["plan"]),
                checkpoint=_record(CheckpointRecord, "checkpoint", data["checkpoint"]),
                segments=_segments(data["segments"]) if data["format"] >= _FIRST_WITH_SEGMENTS else None,
                package_version=_typed("producer.version", data["producer"]["version"], str),
            )
            _check_consistency(config)
        except KVCacheError as error:
            raise EngineError(str(error)) from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(f"a field is missing, unknown or of the wrong kind ({type(error).__name__}: {error}).") from error
        return config


def _segments(data: Any) -> SegmentsRecord | None:
    if data is None:
        return None
    record = SegmentsRecord.from_dict(_typed("segments", data, dict))
    for index, nbytes in enumerate(record.plans):
        _typed(f"segment {index}: plan_nbytes", nbytes, int)
    _record(FileRecord, "segments.constants", asdict(record.constants))
    return record


def _typed(field: str, value: Any, kind: type, *, low: int = 1) -> Any:
    """Return ``value`` if it is a ``kind``: nothing else passes for an int, which is at least ``low``."""
    if kind is int:
        return int_in_range(field, value, low, error=EngineError)
    if not isinstance(value, kind):
        raise EngineError(f"{field}: expected a {kind.__name__}, got {value!r}.")
    return value


def _texts(field: str, values: Any) -> tuple[str, ...]:
    return tuple(_typed(f"{field}[{index}]", value, str) for index, value in enumerate(_typed(field, values, list)))


def _record(kind: type[_Record], field: str, data: Mapping[str, Any], *, low: int = 1) -> _Record:
    """Make a flat dataclass of an object, each value of the type that the dataclass declares."""
    record = kind(**data)
    for name, expected in get_type_hints(kind).items():
        _typed(f"{field}.{name}", getattr(record, name), expected, low=low)
    return record


def _records(kind: type[_Record], field: str, values: Any, *, low: int = 1) -> tuple[_Record, ...]:
    return tuple(_record(kind, f"{field}[{index}]", value, low=low) for index, value in enumerate(_typed(field, values, list)))


def _check_format(data: Mapping[str, Any]) -> None:
    number = data.get("format")
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise EngineError(f"format: expected a number of 1 or more, got {number!r}. This is not the configuration of an engine folder.")
    if number > FORMAT:
        raise EngineError(f"format: this package reads up to {FORMAT}, got {number}. A newer trt-kvcache built the engine: upgrade.")


def _check_consistency(config: EngineConfig) -> None:
    """Compare the fields with each other. The model and the cache's sizes are the measure."""
    cache, names = config.cache, config.names
    _check_attention(config)
    expected = cache_config(
        config.model,
        max_batch_size=cache.max_batch_size,
        max_sequence_length=cache.max_sequence_length,
        dtype=cache.dtype,
        attention=config.attention_variant,
    )
    if cache != expected:
        wanted, got = expected.to_dict(), cache.to_dict()
        field = next(name for name in wanted if wanted[name] != got[name])
        raise EngineError(f"kv_cache.{field}: expected {wanted[field]} by the model, got {got[field]}.")
    one_of("tensorrt.flavour", config.tensorrt_flavour, FLAVOURS[1:], error=EngineError)
    _check_profiles(config)
    wanted_tensors = decoder_tensors(config.model, cache, names)
    if len(wanted_tensors) != len(config.tensors):
        raise EngineError(f"tensors: expected {len(wanted_tensors)} by model and kv_cache, got {len(config.tensors)}.")
    for wanted_spec, spec in zip(wanted_tensors, config.tensors, strict=True):
        if wanted_spec != spec:
            raise EngineError(f"tensor `{spec.name}`: expected {wanted_spec.describe()} by model and kv_cache, got {spec.describe()}.")
    _check_segments(config)


def _check_segments(config: EngineConfig) -> None:
    """Compare the segments with those of the model, and their plans with the file of plans."""
    segmented = config.attention_variant == "plugin" and config.tensorrt_flavour == "tensorrt_rtx"
    if (config.segments is not None) is not segmented:
        found = "none" if config.segments is None else "some"
        raise EngineError(
            f"segments: expected {'some' if segmented else 'none'} of {config.tensorrt_flavour} and {config.attention_variant} attention, "
            f"got {found}."
        )
    if config.segments is None:
        return
    expected = decoder_stages(config.model, config.cache, config.names)
    if len(expected) != len(config.segments.stages):
        raise EngineError(f"segments.steps: expected {len(expected)} by model and kv_cache, got {len(config.segments.stages)}.")
    for index, (wanted, got) in enumerate(zip(expected, config.segments.stages, strict=True)):
        if not can_replace(got, wanted):
            raise EngineError(f"segments.steps[{index}]: expected {wanted} by model and kv_cache, got {got}.")
    _, end = config.segments.spans[-1]
    if end != config.plan.nbytes:
        raise EngineError(f"plan.nbytes: expected {end} by segments, got {config.plan.nbytes}.")


def _check_attention(config: EngineConfig) -> None:
    if len(config.attention) != config.model.num_layers:
        raise EngineError(f"attention: expected {config.model.num_layers} layers by the model, got {len(config.attention)}.")
    for index, choice in enumerate(config.attention):
        if choice.layer != index:
            raise EngineError(f"attention[{index}].layer: expected {index}, got {choice.layer}.")
        one_of(f"attention[{index}].variant", choice.variant, ATTENTION_VARIANTS, error=EngineError)
        if (choice.variant == "plugin") is not (config.attention_variant == "plugin"):
            raise EngineError(f"attention[{index}].variant: expected {config.attention_variant} as the first one, got {choice.variant}.")


def _check_profiles(config: EngineConfig) -> None:
    """Compare the profiles with those of every engine of this package; only the width of the first is free, up to S."""
    if len(config.profiles) != 2:
        raise EngineError(f"profiles: expected 2, for prefill and decode, got {len(config.profiles)}.")
    width = int_in_range("profiles[0].max_width", config.profiles[0].max_width, 1, config.cache.max_sequence_length, error=EngineError)
    expected = decoder_profiles(max_batch_size=config.cache.max_batch_size, max_prefill_length=width)
    for wanted, got in zip(map(asdict, expected), map(asdict, config.profiles), strict=True):
        for name, value in wanted.items():
            if got[name] != value:
                source = " by kv_cache" if name == "max_batch" else ""
                raise EngineError(f"profile {wanted['name']}: expected {name} {value}{source}, got {got[name]}.")
