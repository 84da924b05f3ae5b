"""``QuantizedFormat``: which tensors a format stores for a weight, and how they are read."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache._util.shown import shown
from trt_kvcache.checkpoint.quantized.weight import QuantizedWeight
from trt_kvcache.errors import ConfigError

Arrays = Mapping[str, npt.NDArray[Any]]

#: The dtypes of scales that are floats, as files name them.
FLOATS = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class StoredPart:
    """A tensor that is stored for a quantized weight.

    Parameters
    ----------
    shapes : tuple of tuple of int
        The shapes that it may have.
    dtypes : tuple of str
        The dtypes that it may have, as :class:`~trt_kvcache.checkpoint.safetensors_file.StoredTensor` names them.
    is_required : bool
        Whether it must be there.
    other_name : str, optional
        Another end of its name.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    is_required: bool = True
    other_name: str | None = None


class QuantizedFormat(ABC):
    """How a library stores quantized weights, as ``config.json`` says.

    Attributes
    ----------
    name : str
        What people call the format.
    kinds : tuple of str
        What codes may be: see ``CODE_BITS`` of ``trt_kvcache/checkpoint/quantized/codes.py``.
    title : str
        What people call it, with its bits and groups.
    ignored : tuple of str
        Ends of names of tensors that are not weights: scales of activations and of K and V.
    notes : tuple of str
        What is not computed as the format says.
    kv_dtype : str or None
        What static scales of K and V are for, if the format has them.
    """

    name: str
    kinds: tuple[str, ...]
    title: str
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    kv_dtype: str | None = None

    @abstractmethod
    def main_part(self, module: str) -> str:
        """Return which tensor of a module holds the codes, if it is quantized.

        Parameters
        ----------
        module : str
            The weight without ``.weight``.

        Returns
        -------
        str
            The end of its name, such as ``"qweight"``.
        """

    @abstractmethod
    def parts(self, module: str, shape: tuple[int, int]) -> Mapping[str, StoredPart]:
        """Return which tensors are stored for a quantized weight.

        Parameters
        ----------
        module : str
            The weight without ``.weight``.
        shape : tuple of int
            Of the weight, ``[out, in]``.

        Returns
        -------
        mapping of str to StoredPart
            By the ends of their names.

        Raises
        ------
        ConfigError
            The format cannot store a weight of this shape.
        """

    @abstractmethod
    def weight(self, module: str, arrays: Arrays, shape: tuple[int, int]) -> QuantizedWeight:
        """Return a weight.

        Parameters
        ----------
        module : str
            The weight without ``.weight``.
        arrays : mapping of str to ndarray
            Its tensors by the ends of their names, of the shapes and dtypes of :meth:`parts`.
        shape : tuple of int
            Of the weight.

        Returns
        -------
        QuantizedWeight
            Over the same memory.

        Raises
        ------
        ConfigError
            Values contradict ``config.json``.
        """

    def describe(self) -> dict[str, Any]:
        """Return what decides how the tensors are read, as plain JSON values: fingerprints contain it."""
        return {"title": self.title}


def groups_of(module: str, inputs: int, group_size: int) -> int:
    """Return how many groups the inputs of a weight have.

    Parameters
    ----------
    module : str
        What messages call it.
    inputs : int
        Columns of the weight.
    group_size : int
        Columns of a group.

    Raises
    ------
    ConfigError
        The inputs are not whole groups.
    """
    if inputs % group_size:
        raise ConfigError(f"quantization_config.group_size: expected a divisor of the {inputs} inputs of {module}, got {group_size}.")
    return inputs // group_size


def divided(module: str, what: str, size: int, by: int) -> int:
    """Return ``size // by``, or refuse a weight whose size is not a multiple.

    Parameters
    ----------
    module : str
        What messages call the weight.
    what : str
        Which side.
    size, by : int
        Its length, and codes in an element.

    Raises
    ------
    ConfigError
        It is not a multiple.
    """
    if size % by:
        raise ConfigError(f"{module}: expected a multiple of {by} {what}, as {by} codes share an element, got {size}.")
    return size // by


def one_of_field(name: str, value: object, allowed: tuple[object, ...]) -> Any:
    """Return the value of a field of ``quantization_config``, or refuse one that is not supported.

    Parameters
    ----------
    name : str
        The field.
    value : object
        What it says.
    allowed : tuple of object
        What is read.

    Raises
    ------
    ConfigError
        The value is another one. The message names the field.
    """
    if not any(value == one and type(value) is type(one) for one in allowed):
        expected = " or ".join(shown(one) for one in allowed)
        raise ConfigError(f"quantization_config.{name}: expected {expected}, got {shown(value)}.")
    return value


def checked_expression(name: str, expression: str) -> str:
    """Return a regular expression that names modules.

    Parameters
    ----------
    name : str
        The field.
    expression : str
        What it says.

    Raises
    ------
    ConfigError
        It is no regular expression.
    """
    try:
        re.compile(expression)
    except re.error as error:
        raise ConfigError(f"{name}: expected a regular expression, got {shown(expression)}: {error}.") from error
    return expression


def constant(array: npt.NDArray[Any]) -> float:
    """Return the number in an array of one element."""
    return float(np.asarray(array, np.float32).reshape(-1)[0])
