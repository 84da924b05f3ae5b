"""``Graph``: a TensorRT network under construction. Every layer gets a name, and a layer that TensorRT refuses raises an exception."""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from trt_kvcache.dtypes import dtype_name, numpy_dtype
from trt_kvcache.errors import BuildError
from trt_kvcache.trt.log import Messages
from trt_kvcache.trt.module import CONSTANT_DTYPES, TensorRT

#: 4-bit types: ml_dtypes stores one an element, TensorRT two a byte.
_OF_FOUR_BITS = (np.dtype(ml_dtypes.int4), np.dtype(ml_dtypes.float4_e2m1fn))


def packed_nibbles(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return int4 or float4_e2m1fn values as TensorRT reads them: two a byte, the first in the low bits."""
    nibbles = array.view(np.uint8).reshape(-1) & np.uint8(15)
    packed: np.ndarray[Any, Any] = nibbles[0::2] | nibbles[1::2] << np.uint8(4)
    return packed


class Graph:
    """A thin wrapper around ``INetworkDefinition``, for a model that computes in ``dtype``.

    TensorRT does not copy weights. The graph keeps every array alive: keep the graph until the build is done.
    """

    def __init__(self, tensorrt: TensorRT, network: Any, messages: Messages, *, dtype: str) -> None:
        self.tensorrt = tensorrt
        self.trt = tensorrt.module
        self.network = network
        self.dtype = dtype
        self.messages = messages
        self._owners: list[Any] = []  # of memory that the network points at

    def keep(self, owner: Any) -> None:
        """Keep an object alive as long as the graph, since the network points at its memory."""
        self._owners.append(owner)

    def input(self, name: str, dtype: str, shape: Sequence[int]) -> Any:
        """Add a network input."""
        tensor = self.network.add_input(name, self.tensorrt.data_type(dtype), tuple(shape))
        if tensor is None:
            self.messages.fail(BuildError, f"network input `{name}`: TensorRT refused it")
        return tensor

    def output(self, tensor: Any, name: str) -> None:
        """Mark a tensor as a network output, and rename it."""
        tensor.name = name
        self.network.mark_output(tensor)
        self.check(name)

    def layer(self, name: str, kind: str, *arguments: Any) -> Any:
        """Add a layer with ``INetworkDefinition.add_<kind>(*arguments)``. Set its properties, then call :meth:`result`."""
        add = getattr(self.network, f"add_{kind}", None)
        if add is None:
            raise BuildError(f"layer `{name}`: expected a TensorRT with layers of kind {kind}, {self.tensorrt} has none. Use a newer one.")
        layer = add(*arguments)
        if layer is None:
            self.messages.fail(BuildError, f"layer `{name}`: TensorRT refused {kind}")
        layer.name = name
        return layer

    def result(self, layer: Any) -> Any:
        """Return the output of a layer whose properties are set.

        TensorRT infers shapes and dtypes when the output's shape is read: reading it here makes the error name the layer.
        """
        tensor = layer.get_output(0)
        tensor.name = layer.name
        try:
            _ = tuple(tensor.shape)
        except (RuntimeError, ValueError):
            self.messages.fail(BuildError, f"layer `{layer.name}`: its inputs do not fit")
        self.check(layer.name)
        return tensor

    def op(self, name: str, kind: str, *arguments: Any) -> Any:
        """Add a layer whose properties need not be set, and return its output."""
        return self.result(self.layer(name, kind, *arguments))

    def check(self, name: str) -> None:
        """Raise BuildError if TensorRT has logged an error, although its call returned something."""
        self.messages.check(BuildError, f"layer `{name}`")

    def constant(self, name: str, array: np.ndarray[Any, Any]) -> Any:
        """Add a constant over the memory of a contiguous, aligned array; others are copied, and 4-bit values packed."""
        narrow = array.dtype.name if array.dtype.name in CONSTANT_DTYPES else None
        is_packed = array.dtype in _OF_FOUR_BITS
        stored = packed_nibbles(np.ascontiguousarray(array)) if is_packed else np.require(array, requirements=["C", "A"])
        self.keep(stored)
        data_type = self.tensorrt.data_type(narrow or dtype_name(array.dtype))
        weights = self.trt.Weights(data_type, stored.ctypes.data, array.size)
        return self.op(name, "constant", array.shape, weights)

    def scalar(self, name: str, value: float, dtype: str, rank: int) -> Any:
        """Add a constant with one element, of the shape ``(1,) * rank``."""
        return self.constant(name, np.full((1,) * rank, value, numpy_dtype(dtype)))

    def cast(self, name: str, tensor: Any, dtype: str) -> Any:
        """Convert a tensor to a dtype; no layer is added if it has that dtype."""
        data_type = self.tensorrt.data_type(dtype)
        return tensor if tensor.dtype == data_type else self.op(name, "cast", tensor, data_type)

    def elementwise(self, name: str, left: Any, operation: str, right: Any) -> Any:
        """Combine two tensors element by element."""
        return self.op(name, "elementwise", left, right, getattr(self.trt.ElementWiseOperation, operation))

    def shuffle(
        self,
        name: str,
        tensor: Any,
        *,
        first_transpose: Sequence[int] | None = None,
        reshape: Sequence[int] | None = None,
        second_transpose: Sequence[int] | None = None,
    ) -> Any:
        """Add an ``IShuffleLayer``: transpose, reshape, transpose, in this order. In ``reshape``, 0 keeps a dimension, -1 is inferred."""
        layer = self.layer(name, "shuffle", tensor)
        if first_transpose is not None:
            layer.first_transpose = tuple(first_transpose)
        if reshape is not None:
            layer.reshape_dims = tuple(reshape)
        if second_transpose is not None:
            layer.second_transpose = tuple(second_transpose)
        return self.result(layer)
