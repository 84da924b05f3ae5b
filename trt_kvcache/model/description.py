"""Frozen dataclasses as plain JSON values and back. Fields with default values are left out.

If a field may have one of several classes, each of them has a ``kind``. It is stored, so that reading finds the class again.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.errors import ConfigError

_Described = TypeVar("_Described")


def to_plain(value: Any) -> Any:
    """Return a dataclass, tuple or plain value as a plain JSON value."""
    if is_dataclass(value):
        found = ((field, getattr(value, field.name)) for field in fields(value))
        kind = {"kind": value.kind} if hasattr(value, "kind") else {}
        return kind | {field.name: to_plain(item) for field, item in found if field.default is MISSING or item != field.default}
    return [to_plain(item) for item in value] if isinstance(value, tuple) else value


def from_plain(kind: type[_Described], data: Any, where: str, **made: Any) -> _Described:
    """Return the dataclass of a value of :func:`to_plain`; ``made``: its fields that are not in ``data``. Raises ConfigError."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}: expected an object, got {short_repr(data)}.")
    hints = get_type_hints(kind)
    known = {field.name: field.default is MISSING for field in fields(kind) if field.name not in made}  # type: ignore[arg-type]
    unknown = sorted(str(name) for name in data if name not in known)
    if unknown:
        raise ConfigError(f"{where}: expected only {', '.join(known)}, got {', '.join(unknown):.200} as well.")
    missing = [name for name, is_required in known.items() if is_required and name not in data]
    if missing:
        raise ConfigError(f"{where}.{missing[0]}: expected a value, got none.")
    return kind(**made, **{name: _value(hints[name], item, f"{where}.{name}") for name, item in data.items()})


def _value(kind: Any, data: Any, where: str) -> Any:
    """Return a JSON value as the annotated type of a field."""
    if get_origin(kind) in (Union, UnionType):
        kinds = get_args(kind)
        if data is None and NoneType in kinds:
            return None
        by_kind = {getattr(item, "kind", None): item for item in kinds if item is not NoneType}
        if len(by_kind) == 1:
            (kind,) = by_kind.values()
        else:
            given = data.get("kind") if isinstance(data, Mapping) else None
            if not isinstance(given, str | None) or given not in by_kind:
                raise ConfigError(f"{where}.kind: expected one of {', '.join(map(str, by_kind))}, got {short_repr(given)}.")
            kind = by_kind[given]
            data = {name: item for name, item in data.items() if name != "kind"} if isinstance(data, Mapping) else data
    if is_dataclass(kind):
        if isinstance(data, Mapping) and data.get("kind") == getattr(kind, "kind", data):
            data = {name: item for name, item in data.items() if name != "kind"}
        return from_plain(kind, data, where)  # type: ignore[arg-type]
    if get_origin(kind) is tuple:
        if not isinstance(data, list):
            raise ConfigError(f"{where}: expected a list, got {short_repr(data)}.")
        return tuple(_value(get_args(kind)[0], item, f"{where}[{index}]") for index, item in enumerate(data))
    accepted = (int, float) if kind is float else (kind,)
    if not isinstance(data, accepted) or (isinstance(data, bool) and kind is not bool):
        raise ConfigError(f"{where}: expected a {kind.__name__}, got {short_repr(data)}.")
    if kind is float and abs(data) <= sys.float_info.max:  # the class refuses other values
        return float(data)
    return data
