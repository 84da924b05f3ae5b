"""``QuantizedFormat``: the interface of formats: tensors of a weight, and their reading."""

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

#: Floating-point dtypes of scales, as files name them.
FLOATS = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class StoredPart:
    """A stored tensor of a quantized weight."""

    shapes: tuple[tuple[int, ...], ...]  # the allowed ones
    dtypes: tuple[str, ...]  # the allowed ones, named as in StoredTensor
    is_required: bool = True
    other_name: str | None = None  # another suffix of its name


class QuantizedFormat(ABC):
    """A format of quantized weights, as ``config.json`` describes it."""

    name: str  # common name of the format
    kinds: tuple[str, ...]  # possible kinds of quantized values, keys of VALUE_BITS
    title: str  # name with bits and groups
    ignored: tuple[str, ...] = ()  # suffixes of tensors that are no weights: scales of activations, of K and of V
    notes: tuple[str, ...] = ()  # deviations from the format, for a warning
    kv_dtype: str | None = None  # dtype of K and V that static scales are for

    @abstractmethod
    def main_part(self, module: str) -> str:
        """Return the suffix of the tensor with the quantized values, such as ``"qweight"``. ``module``: the weight without ``.weight``."""

    @abstractmethod
    def parts(self, module: str, shape: tuple[int, int]) -> Mapping[str, StoredPart]:
        """Return the tensors of a weight ``[out, in]`` by suffix. Raises ConfigError for a shape that the format cannot store."""

    @abstractmethod
    def weight(self, module: str, arrays: Arrays, shape: tuple[int, int]) -> QuantizedWeight:
        """Return a weight over its tensors by suffix, already checked against :meth:`parts`. Raises ConfigError for inconsistent values."""

    def describe(self) -> dict[str, Any]:
        """Return the fields that decide how the tensors are read, as plain JSON values for fingerprints."""
        return {"title": self.title}


def groups_of(module: str, inputs: int, group_size: int) -> int:
    """Return the number of groups of a weight's inputs, or refuse a remainder."""
    if inputs % group_size:
        raise ConfigError(f"quantization_config.group_size: expected a divisor of the {inputs} inputs of {module}, got {group_size}.")
    return inputs // group_size


def divided(module: str, what: str, size: int, by: int) -> int:
    """Return ``size // by``, or refuse a size that is not a multiple."""
    if size % by:
        raise ConfigError(f"{module}: expected a multiple of {by} {what}, as {by} values share an element, got {size}.")
    return size // by


def one_of_field(name: str, value: object, allowed: tuple[object, ...]) -> Any:
    """Return the value of a field of ``quantization_config``, or refuse an unsupported one."""
    if not any(value == one and type(value) is type(one) for one in allowed):
        expected = " or ".join(short_repr(one) for one in allowed)
        raise ConfigError(f"quantization_config.{name}: expected {expected}, got {short_repr(value)}.")
    return value


def checked_expression(name: str, expression: str) -> str:
    """Return a valid regular expression for names of modules, or refuse it."""
    try:
        re.compile(expression)
    except re.error as error:
        raise ConfigError(f"{name}: expected a regular expression, got {short_repr(expression)}: {error}.") from error
    return expression


def constant(array: npt.NDArray[Any]) -> float:
    """Return the number in an array of one element."""
    return float(np.asarray(array, np.float32).reshape(-1)[0])
