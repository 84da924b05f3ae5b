"""Texts of plugin fields. Before 10.16 the bindings of full TensorRT repeat the first element of a field in place of the others."""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import numpy as np

from trt_kvcache.errors import EngineError


class _PluginField(ctypes.Structure):
    """``nvinfer1::PluginField``."""

    _fields_: ClassVar = [("name", ctypes.c_char_p), ("data", ctypes.c_void_p), ("type", ctypes.c_int32), ("length", ctypes.c_int32)]


def field_text(field: Any) -> str:
    """Return the text of a ``PluginField`` of type CHAR."""
    data = np.asarray(field.data)
    is_repeated = data.size > 1 and bool((data == data[0]).all())
    stored = _stored(field, data.size) if is_repeated else data.tobytes()
    return stored.rstrip(b"\0").decode()


def _stored(field: Any, length: int) -> bytes:
    """Return the bytes of the C++ field. After the object header, a pybind11 object has a pointer to its C++ object."""
    address = ctypes.c_void_p.from_address(id(field) + object.__basicsize__).value
    stored = None if address is None else _PluginField.from_address(address)
    if stored is None or (stored.type, stored.length) != (int(field.type), length):
        raise EngineError(
            f"field {str(field.name)!r}: expected a text, got {length} equal bytes from TensorRT's bindings. Use TensorRT 10.16."
        )
    return ctypes.string_at(stored.data, stored.length)
