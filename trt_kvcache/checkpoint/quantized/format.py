"""``QuantizedFormat``: which tensors a format stores for a weight, and how they are read."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.checkpoint.quantized.weight import QuantizedWeight
from trt_kvcache.errors import ConfigError

Arrays = Mapping[str, npt.NDArray[Any]]

#: The dtypes of scales that are floats, as files name them.
FLOATS = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class StoredPart:
    """A tensor that is stored for a quantized weight."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    is_required: bool = True
    other_name: str | None = None


class QuantizedFormat(ABC):
    """How a library stores quantized weights, as ``config.json`` says."""

    name: str
    kinds: tuple[str, ...]
    title: str
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    kv_dtype: str | None = None

    @abstractmethod
    def main_part(self, module: str) -> str:
        """Return which tensor of a module holds the codes, if it is quantized."""

    @abstractmethod
    def parts(self, module: str, shape: tuple[int, int]) -> Mapping[str, StoredPart]:
        """Return which tensors are stored for a quantized weight."""

    @abstractmethod
    def weight(self, module: str, arrays: Arrays, shape: tuple[int, int]) -> QuantizedWeight:
        """Return a weight."""

    def describe(self) -> dict[str, Any]:
        """Return what decides how the tensors are read, as plain JSON values: fingerprints contain it."""
        return {"title": self.title}


def groups_of(module: str, inputs: int, group_size: int) -> int:
    """Return how many groups the inputs of a weight have."""
    if inputs % group_size:
        raise ConfigError(f"quantization_config.group_size: expected a divisor of the {inputs} inputs of {module}, got {group_size}.")
    return inputs // group_size


def divided(module: str, what: str, size: int, by: int) -> int:
    """Return ``size // by``, or refuse a weight whose size is not a multiple."""
    if size % by:
        raise ConfigError(f"{module}: expected a multiple of {by} {what}, as {by} codes share an element, got {size}.")
    return size // by


def one_of_field(name: str, value: object, allowed: tuple[object, ...]) -> Any:
    """Return the value of a field of ``quantization_config``, or refuse one that is not supported."""
    if not any(value == one and type(value) is type(one) for one in allowed):
        expected = " or ".join(short_repr(one) for one in allowed)
        raise ConfigError(f"quantization_config.{name}: expected {expected}, got {short_repr(value)}.")
    return value


def checked_expression(name: str, expression: str) -> str:
    """Return a regular expression that names modules."""
    try:
        re.compile(expression)
    except re.error as error:
        raise ConfigError(f"{name}: expected a regular expression, got {short_repr(expression)}: {error}.") from error
    return expression


def constant(array: npt.NDArray[Any]) -> float:
    """Return the number in an array of one element."""
    return float(np.asarray(array, np.float32).reshape(-1)[0])
