"""``read_config``: ``config.json`` of an engine folder, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TypeVar, get_type_hints

from trt_kvcache._util.checks import int_in_range
from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.engine.adapter_inputs import AdapterInputs
from trt_kvcache.engine.attention_variants import AttentionLayerConfig
from trt_kvcache.engine.decoder_cache import decoder_cache_from_dict
from trt_kvcache.engine.hidden_tensors import from_plain
from trt_kvcache.engine.names import TensorNames
from trt_kvcache.engine.protocol import EngineProfile
from trt_kvcache.engine_folder.config import FORMAT, EngineFolderConfig
from trt_kvcache.engine_folder.consistency import check_consistency
from trt_kvcache.engine_folder.records import CheckpointRecord, FileRecord, SegmentsRecord, tensor_from_dict
from trt_kvcache.errors import EngineError, KVCacheError
from trt_kvcache.kernels.token_tree import MAX_TREE_TOKENS
from trt_kvcache.model import ModelConfig

_Record = TypeVar("_Record")


def read_config(data: Mapping[str, Any]) -> EngineFolderConfig:
    """Read ``config.json``; raises EngineError for another format, a wrong field, or fields that contradict each other."""
    _check_format(data)
    try:
        capabilities, library = data["compute_capabilities"], data.get("plugin_library")  # folders of before carry no library
        v_outputs = _typed("v_outputs", data.get("v_outputs", []), list)  # and have no such outputs
        model = ModelConfig.from_description(data["model"])
        config = EngineFolderConfig(
            model=model,
            cache=decoder_cache_from_dict(data["kv_cache"]),
            names=TensorNames(**data["names"]),
            tensors=tuple(map(tensor_from_dict, data["tensors"])),
            profiles=_records(EngineProfile, "profiles", data["profiles"]),
            attention_variant=_typed("attention_variant", data["attention_variant"], str),
            attention_reason=_typed("attention_reason", data["attention_reason"], str),
            attention=_records(AttentionLayerConfig, "attention", data["attention"], low=0),
            tensorrt_flavour=_typed("tensorrt.flavour", data["tensorrt"]["flavour"], str),
            tensorrt_version=_typed("tensorrt.version", data["tensorrt"]["version"], str),
            compute_capabilities=None if capabilities is None else _texts("compute_capabilities", capabilities),
            plan=_record(FileRecord, "plan", data["plan"]),
            checkpoint=_record(CheckpointRecord, "checkpoint", data["checkpoint"]),
            segments=_segments(data["segments"]),
            computed_dtype=None if data["computed_dtype"] is None else _typed("computed_dtype", data["computed_dtype"], str),
            plugin_library=None if library is None else _record(FileRecord, "plugin_library", library),
            v_outputs=tuple(map(tensor_from_dict, v_outputs)),
            adapters=_adapters(data.get("adapters")),  # nor inputs for adapters
            max_embeddings=_typed("max_embeddings", data.get("max_embeddings", 0), int, low=0),  # nor for rows
            draft_tree=_draft_tree(data.get("draft_tree")),  # or for trees
            hidden_layers=from_plain(data.get("hidden_layers"), model),  # nor hidden states
            draft_head=_typed("draft_head", data.get("draft_head", ""), str),
            package_version=_typed("producer.version", data["producer"]["version"], str),
        )
        check_consistency(config)
    except KVCacheError as error:
        raise EngineError(str(error)) from error
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise EngineError(f"a field is missing, unknown or of the wrong kind ({type(error).__name__}: {error!s:.300}).") from error
    return config


def _segments(data: Any) -> SegmentsRecord | None:
    """Read the segments, each value of its type. The stages are compared with the model later."""
    if data is None:
        return None
    record = SegmentsRecord.from_dict(_typed("segments", data, dict))
    for index, nbytes in enumerate(record.plans):
        _typed(f"segment {index}: plan_nbytes", nbytes, int)
    _record(FileRecord, "segments.constants", asdict(record.constants))
    return record


def _adapters(data: Any) -> AdapterInputs | None:
    """Read the inputs for adapters, each value of its type. They are compared with the model later."""
    if data is None:
        return None
    fields = {**_typed("adapters", data, dict)}
    return AdapterInputs(**{**fields, "modules": _texts("adapters.modules", fields["modules"])})


def _draft_tree(data: Any) -> int | None:
    """Read the most tokens of a tree. The model is checked later."""
    return None if data is None else int_in_range("draft_tree", data, 2, MAX_TREE_TOKENS, error=EngineError)


def _typed(field: str, value: Any, kind: type, *, low: int = 1) -> Any:
    """Return ``value`` if it is a ``kind``; an int must be at least ``low``, and a bool is none. Raises EngineError."""
    if kind is int:
        return int_in_range(field, value, low, error=EngineError)
    if not isinstance(value, kind):
        raise EngineError(f"{field}: expected a {kind.__name__}, got {short_repr(value)}.")
    return value


def _texts(field: str, values: Any) -> tuple[str, ...]:
    """Return a list of strings as a tuple. Raises EngineError."""
    return tuple(_typed(f"{field}[{index}]", value, str) for index, value in enumerate(_typed(field, values, list)))


def _record(kind: type[_Record], field: str, data: Mapping[str, Any], *, low: int = 1) -> _Record:
    """Make a flat dataclass from a JSON object, each value of the type that the dataclass declares. Raises EngineError."""
    record = kind(**data)
    for name, expected in get_type_hints(kind).items():
        _typed(f"{field}.{name}", getattr(record, name), expected, low=low)
    return record


def _records(kind: type[_Record], field: str, values: Any, *, low: int = 1) -> tuple[_Record, ...]:
    """Make flat dataclasses from a list of JSON objects. Raises EngineError."""
    return tuple(_record(kind, f"{field}[{index}]", value, low=low) for index, value in enumerate(_typed(field, values, list)))


def _check_format(data: Mapping[str, Any]) -> None:
    """Raise EngineError for a format that this package does not read."""
    number = data.get("format")
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise EngineError(
            f"format: expected a number of 1 or more, got {short_repr(number)}. This is not the configuration of an engine folder."
        )
    if number > FORMAT:
        raise EngineError(f"format: this package reads {FORMAT}, got {short_repr(number)}. A newer trt-kvcache built the engine: upgrade.")
    if number < FORMAT:
        raise EngineError(f"format: this package reads {FORMAT}, got {number}. An older trt-kvcache built the engine: build it again.")
