"""Calls of a plugin as TensorRT makes them: through the trampolines that the bindings put between C++ and the Python methods.

Numbers of the functions, by the names in ``NvInferRuntime.h`` and ``NvInferRuntimePlugin.h``. They are the same from 10.3 to 11.4. Every
class begins with ``IVersionedInterface``:

====== ========================= ============================= ======================= ========================== ==================
number IPluginCreatorV3One       IPluginV3                     IPluginV3OneCore        IPluginV3OneBuildV2        IPluginV3OneRuntime
====== ========================= ============================= ======================= ========================== ==================
0      getAPILanguage            the same                      the same                the same                   the same
1      getInterfaceInfo          the same                      the same                the same                   the same
2, 3   destructors               the same; 3 is ``delete``     the same                the same                   the same
4      createPlugin              getCapabilityInterface        getPluginName           configurePlugin            setTactic
5      getFieldNames             clone                         getPluginVersion        getOutputDataTypes         onShapeChange
6      getPluginName                                           getPluginNamespace      getOutputShapes            enqueue
7      getPluginVersion                                                                supportsFormatCombination  attachToContext
8      getPluginNamespace                                                              getNbOutputs               getFieldsToSerialize
9                                                                                      getWorkspaceSize
15                                                                                     getAliasedInput
====== ========================= ============================= ======================= ========================== ==================

``IProgressMonitor``: 4 phaseStart, 5 stepComplete, 6 phaseFinish.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_bool, c_char_p, c_double, c_int32, c_int64, c_size_t, c_void_p
from typing import Any

from .cpp import (
    CppObject,
    Dims,
    DimsExprs,
    DynamicPluginTensorDesc,
    PluginField,
    PluginFieldCollection,
    PluginTensorDesc,
    call,
    function,
    keep,
    object_at,
)

#: Shape and ``DataType`` of a tensor.
Typed = tuple[tuple[int, ...], int]

_FIELD_TYPES = {2: c_double, 5: c_int32}  # PluginFieldType: kFLOAT64, kINT32
_CHAR = 6  # kCHAR

#: Value of a field: a number, or the bytes of a text.
Field = float | bytes
_LARGEST = 7  # what a free size is at most


class Size(CppObject):
    """``IDimensionExpr``: a size that is constant, or, where it is -1, not known yet."""

    def __init__(self, value: int) -> None:
        self.value = value
        super().__init__({"isConstant": (1, 2), "getConstantValue": (1, 3), "isSizeTensor": (1, 4)})

    @function(c_bool)
    def isConstant(self) -> bool:
        return self.value >= 0

    @function(c_int64)
    def getConstantValue(self) -> int:
        assert self.value >= 0, "a size was read that is not known"
        return self.value

    @function(c_bool)
    def isSizeTensor(self) -> bool:
        return False


def expressions(shapes: Sequence[tuple[int, ...]]) -> Any:
    """Return an array of ``DimsExprs``."""
    exprs = [DimsExprs(len(shape), (c_void_p * 8)(*[keep(Size(size)).address for size in shape])) for shape in shapes]
    return keep((DimsExprs * len(exprs))(*exprs))


def descriptions(tensors: Sequence[Typed]) -> Any:
    """Return an array of ``PluginTensorDesc``."""
    return keep((PluginTensorDesc * len(tensors))(*[PluginTensorDesc(Dims.of(shape), kind, 0, 1.0) for shape, kind in tensors]))


def dynamic_descriptions(tensors: Sequence[Typed]) -> Any:
    """Return an array of ``DynamicPluginTensorDesc``: free sizes are from 1 to 7."""

    def describe(shape: tuple[int, ...], kind: int) -> DynamicPluginTensorDesc:
        low, high = ([free if size < 0 else size for size in shape] for free in (1, _LARGEST))
        return DynamicPluginTensorDesc(PluginTensorDesc(Dims.of(shape), kind, 0, 1.0), *map(Dims.of, (low, high, high)))

    return keep((DynamicPluginTensorDesc * len(tensors))(*[describe(*one) for one in tensors]))


def fields(values: dict[str, Field]) -> PluginFieldCollection:
    """Return plugin fields: int32, float64 or texts."""
    made = [_field(name, value) for name, value in values.items()]
    return keep(PluginFieldCollection(len(made), keep((PluginField * len(made))(*made))))  # type: ignore[no-any-return]


def _field(name: str, value: Field) -> PluginField:
    if isinstance(value, bytes):
        return PluginField(name.encode(), ctypes.addressof(keep(ctypes.create_string_buffer(value, len(value)))), _CHAR, len(value))
    data = keep(c_double(value) if isinstance(value, float) else c_int32(value))
    return PluginField(name.encode(), ctypes.addressof(data), 2 if isinstance(value, float) else 5, 1)


def _value(field: PluginField) -> Field:
    if field.type == _CHAR:
        return ctypes.string_at(field.data, field.length)
    return _FIELD_TYPES[field.type].from_address(field.data).value  # type: ignore[no-any-return]


class Creator:
    """A plugin creator that was registered."""

    def __init__(self, address: int) -> None:
        self.address = address
        self.key: tuple[bytes, ...] = tuple(call(address, number, c_char_p) for number in (6, 7, 8))

    def field_names(self) -> dict[str, int]:
        """Name and ``PluginFieldType`` of each field."""
        found = call(self.address, 5, POINTER(PluginFieldCollection)).contents
        return {found.fields[index].name.decode(): found.fields[index].type for index in range(found.count)}

    def create(self, values: PluginFieldCollection, phase: int) -> "Plugin | None":
        """``phase``: 0 build, 1 runtime."""
        made = call(self.address, 4, c_void_p, c_char_p(b"layer"), values, c_int32(phase))
        return Plugin(made) if made else None


class Plugin:
    """A plugin, at the address that TensorRT has of it. Functions that return a status return True where it is success."""

    def __init__(self, address: int) -> None:
        self.address = address
        self.core, self.build, self.runtime = (call(address, 4, c_void_p, c_int32(kind)) for kind in (0, 1, 2))

    def key(self) -> tuple[bytes, ...]:
        return tuple(call(self.core, number, c_char_p) for number in (4, 5, 6))

    def clone(self) -> "Plugin":
        return Plugin(call(self.address, 5, c_void_p))

    def destroy(self) -> None:
        """``delete`` it: the last thing that TensorRT does with each plugin that it has."""
        call(self.address, 3, None)

    def num_outputs(self) -> int:
        return int(call(self.build, 8, c_int32))

    def output_types(self, kinds: Sequence[int]) -> list[int] | None:
        out = (c_int32 * self.num_outputs())()
        given = (c_int32 * len(kinds))(*kinds)
        failed = call(self.build, 5, c_int32, out, c_int32(len(out)), given, c_int32(len(kinds)))
        return None if failed else [*out]

    def output_shapes(self, shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]] | None:
        given, out = expressions(shapes), (DimsExprs * self.num_outputs())()
        builder = keep(_ExprBuilder({"constant": (1, 2)}))
        shape_inputs = keep((DimsExprs * 1)())
        failed = call(
            self.build, 6, c_int32, given, c_int32(len(shapes)), shape_inputs, c_int32(0), out, c_int32(len(out)), c_void_p(builder.address)
        )
        return None if failed else [tuple(object_at(one.d[index]).value for index in range(one.count)) for one in out]

    def aliased_inputs(self) -> list[int]:
        return [call(self.build, 15, c_int32, c_int32(output)) for output in range(self.num_outputs())]

    def supports(self, position: int, tensors: Sequence[Typed], num_inputs: int) -> bool:
        described = dynamic_descriptions(tensors)
        return bool(call(self.build, 7, c_bool, c_int32(position), described, c_int32(num_inputs), c_int32(len(tensors) - num_inputs)))

    def configure(self, tensors: Sequence[Typed], num_inputs: int) -> bool:
        ins, outs = dynamic_descriptions(tensors[:num_inputs]), dynamic_descriptions(tensors[num_inputs:])
        return not call(self.build, 4, c_int32, ins, c_int32(len(ins)), outs, c_int32(len(outs)))

    def workspace_nbytes(self, tensors: Sequence[Typed], num_inputs: int) -> int:
        ins, outs = dynamic_descriptions(tensors[:num_inputs]), dynamic_descriptions(tensors[num_inputs:])
        return int(call(self.build, 9, c_size_t, ins, c_int32(len(ins)), outs, c_int32(len(outs))))

    def serialized(self) -> dict[str, Field] | None:
        """Return the fields that an engine stores, as TensorRT asks for them: from a thread that Python knows nothing of."""
        return in_a_thread(self._serialized)

    def _serialized(self) -> dict[str, Field] | None:
        found = call(self.runtime, 8, c_void_p)
        if not found:
            return None
        collection = PluginFieldCollection.from_address(found)
        each = [collection.fields[index] for index in range(collection.count)]
        return {one.name.decode(): _value(one) for one in each}

    def attach(self) -> "Plugin":
        """Return the plugin of an execution context."""
        return Plugin(call(self.runtime, 7, c_void_p, None))

    def on_shape_change(self, tensors: Sequence[Typed], num_inputs: int) -> bool:
        ins, outs = descriptions(tensors[:num_inputs]), descriptions(tensors[num_inputs:])
        return not call(self.runtime, 5, c_int32, ins, c_int32(len(ins)), outs, c_int32(len(outs)))

    def set_tactic(self, tactic: int) -> bool:
        return not call(self.runtime, 4, c_int32, c_int32(tactic))

    def enqueue(self, tensors: Sequence[Typed], inputs: Sequence[int], outputs: Sequence[int], workspace: int, stream: int) -> bool:
        ins, outs = descriptions(tensors[: len(inputs)]), descriptions(tensors[len(inputs) :])
        addresses = [(c_void_p * len(each))(*each) for each in (inputs, outputs)]
        return not call(self.runtime, 6, c_int32, ins, outs, *addresses, c_void_p(workspace), c_void_p(stream))


class _ExprBuilder(CppObject):
    """``IExprBuilder``, of which plugins take constants alone."""

    @function(c_void_p, c_int64)
    def constant(self, value: int) -> int:
        return keep(Size(value)).address  # type: ignore[no-any-return]


def in_a_thread(work: Callable[[], Any]) -> Any:
    """Return what ``work`` returns in a thread of its own, or raise what it raises."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001  # raised again below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
