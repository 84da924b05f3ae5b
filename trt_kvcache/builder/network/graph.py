"""``Graph``: a TensorRT network under construction. Every layer gets a name, and a layer that TensorRT refuses raises an exception."""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from trt_kvcache.dtypes import dtype_name, numpy_dtype
from trt_kvcache.errors import BuildError
from trt_kvcache.trt.log import Messages
from trt_kvcache.trt.module import CONSTANT_DTYPES, TensorRT

#: What ml_dtypes stores one an element, and TensorRT two a byte.
_OF_FOUR_BITS = (np.dtype(ml_dtypes.int4), np.dtype(ml_dtypes.float4_e2m1fn))


def packed_nibbles(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return codes of 4 bits as TensorRT reads them.

    Parameters
    ----------
    array : ndarray
        int4 or float4_e2m1fn of ml_dtypes, one an element, of an even size.

    Returns
    -------
    ndarray uint8 ``[size / 2]``
        Two a byte, the first in the low bits.

    Examples
    --------
    >>> packed_nibbles(np.array([[1, -1], [7, 0]], ml_dtypes.int4))
    array([241,   7], dtype=uint8)
    """
    nibbles = array.view(np.uint8).reshape(-1) & np.uint8(15)
    packed: np.ndarray[Any, Any] = nibbles[0::2] | nibbles[1::2] << np.uint8(4)
    return packed


class Graph:
    """A thin wrapper around ``INetworkDefinition``.

    TensorRT does not copy the weights that it is given. The graph keeps every array alive, so keep the graph until the build is done.

    Parameters
    ----------
    tensorrt : TensorRT
        The imported TensorRT.
    network : INetworkDefinition
        An empty network.
    messages : Messages
        An open collection of TensorRT's log.
    dtype : str
        What the model computes in: ``"float16"``, ``"bfloat16"`` or ``"float32"``.

    Attributes
    ----------
    tensorrt : TensorRT
        As given.
    trt : module
        The module of TensorRT.
    network : INetworkDefinition
        The network that layers are added to; it may be replaced by the next one.
    dtype : str
        As given.
    """

    def __init__(self, tensorrt: TensorRT, network: Any, messages: Messages, *, dtype: str) -> None:
        self.tensorrt = tensorrt
        self.trt = tensorrt.module
        self.network = network
        self.dtype = dtype
        self._messages = messages
        self._arrays: list[np.ndarray[Any, Any]] = []

    def input(self, name: str, dtype: str, shape: Sequence[int]) -> Any:
        """Add a network input.

        Parameters
        ----------
        name : str
            Name of the input.
        dtype : str
            As in :mod:`trt_kvcache.dtypes`.
        shape : sequence of int
            ``-1`` for sizes that are known at run time only.

        Returns
        -------
        ITensor
            The input as a tensor of the network, to be given to layers.

        Raises
        ------
        BuildError
            TensorRT refused it.
        """
        tensor = self.network.add_input(name, self.tensorrt.data_type(dtype), tuple(shape))
        if tensor is None:
            self._messages.fail(BuildError, f"network input `{name}`: TensorRT refused it")
        return tensor

    def output(self, tensor: Any, name: str) -> None:
        """Mark a tensor as a network output.

        Parameters
        ----------
        tensor : ITensor
            A tensor of the network; it is renamed.
        name : str
            Name of the output.

        Raises
        ------
        BuildError
            TensorRT logged an error.
        """
        tensor.name = name
        self.network.mark_output(tensor)
        self.check(name)

    def layer(self, name: str, kind: str, *arguments: Any) -> Any:
        """Add a layer with ``INetworkDefinition.add_<kind>(*arguments)``.

        Parameters
        ----------
        name : str
            Name of the layer.
        kind : str
            Such as ``"cast"`` or ``"matrix_multiply"``.
        *arguments
            Arguments of the method.

        Returns
        -------
        ILayer
            Set its properties, then call :meth:`result`, which checks them.

        Raises
        ------
        BuildError
            TensorRT refused it, or has no such layers.
        """
        add = getattr(self.network, f"add_{kind}", None)
        if add is None:
            raise BuildError(f"layer `{name}`: expected a TensorRT with layers of kind {kind}, {self.tensorrt} has none. Use a newer one.")
        layer = add(*arguments)
        if layer is None:
            self._messages.fail(BuildError, f"layer `{name}`: TensorRT refused {kind}")
        layer.name = name
        return layer

    def result(self, layer: Any) -> Any:
        """Return the output of a layer whose properties are set.

        TensorRT infers shapes and dtypes when the shape of the output is read, not when the layer is added. Reading it here makes
        sure that the error names the layer at fault.

        Parameters
        ----------
        layer : ILayer
            A layer whose properties are set.

        Returns
        -------
        ITensor
            Its first output.

        Raises
        ------
        BuildError
            The inputs of the layer do not fit, or TensorRT logged an error.
        """
        tensor = layer.get_output(0)
        tensor.name = layer.name
        try:
            _ = tuple(tensor.shape)
        except (RuntimeError, ValueError):
            self._messages.fail(BuildError, f"layer `{layer.name}`: its inputs do not fit")
        self.check(layer.name)
        return tensor

    def op(self, name: str, kind: str, *arguments: Any) -> Any:
        """Add a layer whose properties need not be set, and return its output.

        Parameters
        ----------
        name : str
            Name of the layer.
        kind : str
            See :meth:`layer`.
        *arguments
            Arguments of the method.

        Returns
        -------
        ITensor
            The layer's first output, which has the name of the layer.

        Raises
        ------
        BuildError
            TensorRT refused it; the text is what it logged.
        """
        return self.result(self.layer(name, kind, *arguments))

    def check(self, name: str) -> None:
        """Raise an exception if TensorRT has logged an error, although its call returned something.

        Parameters
        ----------
        name : str
            Name of the layer, for the message.

        Raises
        ------
        BuildError
            TensorRT has logged an error since the messages were collected.
        """
        self._messages.check(BuildError, f"layer `{name}`")

    def constant(self, name: str, array: np.ndarray[Any, Any]) -> Any:
        """Add a constant.

        Parameters
        ----------
        name : str
            Name of the layer.
        array : ndarray
            Its memory is used if it is contiguous and aligned; else it is copied. int4 and float4_e2m1fn of ml_dtypes are packed, two a
            byte.

        Returns
        -------
        ITensor
            Of the shape and dtype of the array.

        Raises
        ------
        BuildError
            TensorRT refused it; the text is what it logged.
        """
        narrow = array.dtype.name if array.dtype.name in CONSTANT_DTYPES else None
        is_packed = array.dtype in _OF_FOUR_BITS
        stored = packed_nibbles(np.ascontiguousarray(array)) if is_packed else np.require(array, requirements=["C", "A"])
        self._arrays.append(stored)
        data_type = self.tensorrt.data_type(narrow or dtype_name(array.dtype))
        weights = self.trt.Weights(data_type, stored.ctypes.data, array.size)
        return self.op(name, "constant", array.shape, weights)

    def scalar(self, name: str, value: float, dtype: str, rank: int) -> Any:
        """Add a constant with one element.

        Parameters
        ----------
        name : str
            Name of the layer.
        value : float
            The element.
        dtype : str
            As in :mod:`trt_kvcache.dtypes`.
        rank : int
            Number of dimensions, each of size 1; 0 for a true scalar.

        Returns
        -------
        ITensor
            Of ``dtype``, with the shape ``(1,) * rank``.

        Raises
        ------
        BuildError
            TensorRT refused it; the text is what it logged.
        """
        return self.constant(name, np.full((1,) * rank, value, numpy_dtype(dtype)))

    def cast(self, name: str, tensor: Any, dtype: str) -> Any:
        """Convert a tensor to a dtype; without a layer if it has that dtype already.

        Parameters
        ----------
        name : str
            Name of the layer.
        tensor : ITensor
            What to convert.
        dtype : str
            As in :mod:`trt_kvcache.dtypes`.

        Returns
        -------
        ITensor
            Of ``dtype``, with the shape of ``tensor``; ``tensor`` itself if there is nothing to convert.

        Raises
        ------
        BuildError
            TensorRT refused it; the text is what it logged.
        """
        data_type = self.tensorrt.data_type(dtype)
        return tensor if tensor.dtype == data_type else self.op(name, "cast", tensor, data_type)

    def elementwise(self, name: str, left: Any, operation: str, right: Any) -> Any:
        """Combine two tensors element by element.

        Parameters
        ----------
        name : str
            Name of the layer.
        left : ITensor
            The first operand.
        operation : str
            A member of ``ElementWiseOperation``, such as ``"SUM"``.
        right : ITensor
            The second operand, of the rank and dtype of the first.

        Returns
        -------
        ITensor
            Of the shape that both operands are broadcast to: a size of 1 fits any other. Its dtype is theirs, or bool for a comparison.

        Raises
        ------
        BuildError
            TensorRT refused it; the text is what it logged.
        """
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
        """Add an ``IShuffleLayer``: transpose, reshape, transpose, in this order.

        Parameters
        ----------
        name : str
            Name of the layer.
        tensor : ITensor
            What to rearrange.
        first_transpose, second_transpose : sequence of int, optional
            Permutations of the dimensions.
        reshape : sequence of int, optional
            The new shape; 0 keeps a dimension, -1 is inferred.

        Returns
        -------
        ITensor
            The same elements, of the same dtype, in the new order and shape.
        """
        layer = self.layer(name, "shuffle", tensor)
        if first_transpose is not None:
            layer.first_transpose = tuple(first_transpose)
        if reshape is not None:
            layer.reshape_dims = tuple(reshape)
        if second_transpose is not None:
            layer.second_transpose = tuple(second_transpose)
        return self.result(layer)
