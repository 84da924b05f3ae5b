"""An ONNX model of plugin layers alone, as the bytes of a ``ModelProto``: a dozen fields of protobuf, so that no package is needed.

The numbers of fields and types are those of ``onnx.proto3``. TensorRT's parser makes a plugin layer of each node in the domain
``trt.plugins``. Its inputs are placeholders, zeros of the right dtype and shape, since plugins check both: one zero, which an ``Expand``
repeats, so that a placeholder for a cache is no larger than one for lengths.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from trt_kvcache.dtypes import itemsize
from trt_kvcache.ops.custom_op import TensorType
from trt_kvcache.trt.plugin_node import PluginNode

_IR_VERSION, _OPSET = 8, 17
_DOMAIN = "trt.plugins"

#: ``TensorProto.DataType``.
_ELEMENT_TYPES = {"float32": 1, "int8": 3, "int32": 6, "int64": 7, "float16": 10, "bfloat16": 16}

#: Number of the field that holds the value in an ``AttributeProto``, and the value of its field ``type``.
_FLOAT, _INT, _STRING = (2, 1), (3, 2), (4, 3)

#: Wire types of protobuf.
_VARINT, _LENGTH_DELIMITED, _FIXED32 = 0, 2, 5


def model_proto(nodes: Sequence[PluginNode]) -> bytes:
    """Return a model whose nodes are these plugin layers, in order, over placeholders. It has neither inputs nor outputs."""
    kinds = dict.fromkeys(_known(one) for node in nodes for one in node.inputs)
    names = {kind: f"placeholder_{index}" for index, kind in enumerate(kinds)}
    dtypes = dict.fromkeys(kind.dtype for kind in kinds)
    zeros = [_tensor(f"zero_{dtype}", dtype, (), bytes(itemsize(dtype))) for dtype in dtypes]
    shapes = [_tensor(f"{name}_shape", "int64", (len(kind.shape),), np.array(kind.shape, "<i8").tobytes()) for kind, name in names.items()]
    placeholders = [_node("Expand", name, (f"zero_{kind.dtype}", f"{name}_shape"), (name,)) for kind, name in names.items()]
    plugins = [_plugin_node(node, [names[_known(one)] for one in node.inputs]) for node in nodes]
    graph = [
        *(_message(1, node) for node in (*placeholders, *plugins)),
        _message(2, b"plugin_layers"),
        *(_message(5, tensor) for tensor in (*zeros, *shapes)),
    ]
    opsets = [_message(8, _message(1, domain.encode()) + _number(2, version)) for domain, version in (("", _OPSET), (_DOMAIN, 1))]
    return b"".join([_number(1, _IR_VERSION), _message(7, b"".join(graph)), *opsets])


def _known(tensor: TensorType) -> TensorType:
    """Return the type of a placeholder: 1 for each size that is known at run time only."""
    return TensorType(tuple(1 if size < 0 else size for size in tensor.shape), tensor.dtype)


def _plugin_node(node: PluginNode, inputs: Iterable[str]) -> bytes:
    """Return the ``NodeProto`` of a plugin layer: its fields, and the key of its creator, are attributes."""
    texts = {"plugin_version": node.version, "plugin_namespace": node.namespace}
    attributes = [_attribute(name, _STRING, _message(_STRING[0], text.encode())) for name, text in texts.items()]
    attributes += [_field_attribute(name, node.field_types[name], value) for name, value in node.fields.items()]
    outputs = (f"{node.name}:{index}" for index in range(node.num_outputs))
    return _node(node.plugin, node.name, inputs, outputs, attributes=attributes, domain=_DOMAIN)


def _field_attribute(name: str, kind: str, value: np.ndarray[Any, Any]) -> bytes:
    """Return the ``AttributeProto`` of a field. A double becomes a float, since no attribute is a double."""
    if kind == "CHAR":
        return _attribute(name, _STRING, _message(_STRING[0], value.tobytes()))
    if kind == "FLOAT64":
        return _attribute(name, _FLOAT, _tag(_FLOAT[0], _FIXED32) + value.astype("<f4").tobytes())
    return _attribute(name, _INT, _number(_INT[0], int(value[0])))


def _node(
    operator: str, name: str, inputs: Iterable[str], outputs: Iterable[str], *, attributes: Iterable[bytes] = (), domain: str = ""
) -> bytes:
    """Return a ``NodeProto``."""
    sides = [_message(field, one.encode()) for field, side in ((1, inputs), (2, outputs)) for one in side]
    own = [_message(field, text.encode()) for field, text in ((3, name), (4, operator), (7, domain))]
    return b"".join([*sides, *own, *(_message(5, one) for one in attributes)])


def _attribute(name: str, kind: tuple[int, int], value: bytes) -> bytes:
    """Return an ``AttributeProto``; ``value`` is the encoded field that holds the value."""
    return _message(1, name.encode()) + value + _number(20, kind[1])


def _tensor(name: str, dtype: str, shape: Sequence[int], data: bytes) -> bytes:
    """Return a ``TensorProto``."""
    return b"".join(
        [*(_number(1, size) for size in shape), _number(2, _ELEMENT_TYPES[dtype]), _message(8, name.encode()), _message(9, data)]
    )


def _message(field: int, content: bytes) -> bytes:
    """Encode a field that is a message, a text or bytes."""
    return _tag(field, _LENGTH_DELIMITED) + _varint(len(content)) + content


def _number(field: int, value: int) -> bytes:
    """Encode a field that is an integer."""
    return _tag(field, _VARINT) + _varint(value)


def _tag(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _varint(value: int) -> bytes:
    """Encode a number from 0 on: seven bits a byte, the lowest first, the high bit set in all but the last."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
