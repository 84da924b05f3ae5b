"""C++ objects that are played by Python, for compiled code that calls their virtual functions; and calls of virtual functions from Python.

An object with virtual functions begins with the address of its table of functions; two words before its first function a table holds
an offset (0) and the address of the type's description, which the bindings read (``typeid``). A call is "the function at this number of the
table, with the object as its first argument". Small structures are returned in registers; a larger one (``Dims``) is written to memory
whose address comes before the object.

TensorRT's public classes (``INetworkDefinition``) have few virtual functions of their own. Their second word, and in derived classes the
third one too, is the address of a private object (``apiv::VNetworkDefinition``) whose virtual functions do the work. So a function here is
found by two numbers, its *place*: which word of the object (0: the object itself), and which function of the table there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

#: Functions in each table: more than any class of TensorRT has. Words of an object that lead to a table.
TABLE_LENGTH, WORDS = 160, 3

#: (word, number of the function)
Place = tuple[int, int]


class Dims(Structure):
    """``nvinfer1::Dims64``."""

    _fields_ = (("count", c_int32), ("d", c_int64 * 8))

    @classmethod
    def of(cls, shape: Any) -> Dims:
        return cls(len(shape), (c_int64 * 8)(*shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.d[: self.count])

    def set(self, shape: tuple[int, ...] | None) -> None:
        """Set the sizes; None: a shape that is not valid."""
        self.count = -1 if shape is None else len(shape)
        self.d = (c_int64 * 8)(*(shape or ()))


class Weights(Structure):
    """``nvinfer1::Weights``."""

    _fields_ = (("type", c_int32), ("values", c_void_p), ("count", c_int64))


class Permutation(Structure):
    """``nvinfer1::Permutation``."""

    _fields_ = (("order", c_int32 * 8),)


class PluginTensorDesc(Structure):
    _fields_ = (("dims", Dims), ("type", c_int32), ("format", c_int32), ("scale", c_float))


class DynamicPluginTensorDesc(Structure):
    _fields_ = (("desc", PluginTensorDesc), ("min", Dims), ("max", Dims), ("opt", Dims))


class DimsExprs(Structure):
    _fields_ = (("count", c_int32), ("d", c_void_p * 8))


class PluginField(Structure):
    _fields_ = (("name", c_char_p), ("data", c_void_p), ("type", c_int32), ("length", c_int32))


class PluginFieldCollection(Structure):
    _fields_ = (("count", c_int32), ("fields", POINTER(PluginField)))


#: What virtual functions that Python plays have raised.
FAILURES: list[BaseException] = []

_KEPT: list[Any] = []  # what compiled code points at, until the end of the process
_OBJECTS: dict[int, CppObject] = {}


def _table(functions: Mapping[int, Any]) -> int:
    """Return the address of the first function of a new table; numbers that are not in ``functions`` report the call."""
    table = (c_void_p * (2 + TABLE_LENGTH))(0, ctypes.addressof(_TYPE_INFO), *_UNEXPECTED)
    for number, compiled in functions.items():
        table[2 + number] = ctypes.cast(compiled, c_void_p).value
    _KEPT.extend((table, functions))
    return ctypes.addressof(table) + 2 * ctypes.sizeof(c_void_p)


def _unexpected(number: int) -> Any:
    def call(this: int) -> int:
        what = _OBJECTS.get(this, "an object")
        FAILURES.append(AssertionError(f"{what}: function {number} was called, which the stand-in does not have"))
        return 0

    compiled = keep(CFUNCTYPE(c_void_p, c_void_p)(call))
    return ctypes.cast(compiled, c_void_p).value


_TYPE_NAME = c_char_p(b"stand-in")
_TYPE_FUNCTIONS = (c_void_p * 16)()
_TYPE_INFO = (c_void_p * 2)(ctypes.addressof(_TYPE_FUNCTIONS), ctypes.cast(_TYPE_NAME, c_void_p))


def raw_object(tables: list[Mapping[int, Any]]) -> list[int]:
    """Make an object of ``WORDS`` tables; return its address, followed by those of the private objects that its words lead to."""
    return _object([_table(functions) for functions in tables])


def _object(tables: Sequence[int]) -> list[int]:
    first, *others = tables
    inner = [(c_void_p * 1)(table) for table in others]
    whole = (c_void_p * (WORDS + 1))(first, *map(ctypes.addressof, inner))
    _KEPT.extend((inner, whole))
    return [ctypes.addressof(whole), *map(ctypes.addressof, inner)]


def function(result: Any, *arguments: Any) -> Callable[[Any], Any]:
    """Mark a method as a virtual function with these C types, by the name that it has in TensorRT's headers."""

    def mark(method: Any) -> Any:
        method.c_types = (result, arguments)
        return method

    return mark


class CppObject:
    """Base of the objects that Python plays. The marked methods (:func:`function`) are its virtual functions.

    ``places`` says where the functions are, by name. Functions that this release does not have are not in it.
    """

    def __init__(self, places: Mapping[str, Place]) -> None:
        self.address, *inner = _object(_tables(type(self), tuple(places.items())))
        for one in (self.address, *inner):
            _OBJECTS[one] = self

    def destroyed(self) -> None:
        """Do what the destructor does; the memory stays."""

    def __str__(self) -> str:
        return type(self).__name__


@cache
def _tables(kind: type[CppObject], places: tuple[tuple[str, Place], ...]) -> tuple[int, ...]:
    """Return the tables of a class."""
    tables: list[dict[int, Any]] = [{} for _ in range(WORDS)]
    destroy = CFUNCTYPE(None, c_void_p)(lambda this: _OBJECTS[this].destroyed())
    tables[0] |= {0: destroy, 1: destroy}  # the destructors of most classes; a registry has others there
    for name, (word, number) in places:
        tables[word][number] = _compiled(name, *getattr(kind, name).c_types)
    return tuple(map(_table, tables))


def take_over(address: int, thing: CppObject) -> None:
    """Make the object at ``address`` behave like ``thing``, for compiled code that has remembered the address."""
    ctypes.memmove(address, thing.address, (WORDS + 1) * ctypes.sizeof(c_void_p))
    _OBJECTS[address] = thing


def _compiled(name: str, result: Any, arguments: tuple[Any, ...]) -> Any:
    """Return a C function that calls a method of an object."""
    if result is Dims:

        def fill(out: int, this: int, *given: Any) -> int:
            shape = _attempt(this, name, given)
            Dims.from_address(out).set(shape)
            return out

        return CFUNCTYPE(c_void_p, c_void_p, c_void_p, *arguments)(fill)

    def call(this: int, *given: Any) -> Any:
        answer = _attempt(this, name, given)
        if answer is None and result is not None:
            return 0
        if isinstance(answer, CppObject):
            return answer.address
        if isinstance(answer, bytes):
            _KEPT.append(text := ctypes.create_string_buffer(answer))
            return ctypes.addressof(text)
        return answer

    return CFUNCTYPE(result, c_void_p, *arguments)(call)


def _attempt(this: int, name: str, given: tuple[Any, ...]) -> Any:
    """Return what a method returns; compiled code cannot take an exception, so that is kept and the result is None."""
    try:
        return getattr(_OBJECTS[this], name)(*given)
    except BaseException as error:  # noqa: BLE001
        FAILURES.append(error)
        return None


def object_at(address: int) -> Any:
    """Return the object that Python plays at an address."""
    return _OBJECTS[address]


def keep(*things: Any) -> Any:
    """Keep memory that compiled code points at; return the first."""
    _KEPT.extend(things)
    return things[0]


def call(thing: int, number: int, result: Any, *arguments: Any) -> Any:
    """Call a virtual function of a compiled object: structures and arrays by their address, numbers with their C type."""
    table = ctypes.cast(thing, POINTER(c_void_p))[0]
    assert table is not None
    types = [type(one) if isinstance(one, ctypes._SimpleCData) else c_void_p for one in arguments]
    values = [ctypes.addressof(one) if isinstance(one, Structure | ctypes.Array) else one for one in arguments]
    return CFUNCTYPE(result, c_void_p, *types)(ctypes.cast(table, POINTER(c_void_p))[number])(thing, *values)


_UNEXPECTED = [_unexpected(number) for number in range(TABLE_LENGTH)]
