"""``Graph``: a TensorRT network under construction, where every layer has a name and every refusal is an exception."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from trt_kvcache.dtypes import dtype_name, numpy_dtype
from trt_kvcache.errors import BuildError
from trt_kvcache.trt.log import Messages
from trt_kvcache.trt.module import TensorRT


class Graph:
    """A thin wrapper over ``INetworkDefinition``.

    TensorRT only points at the weights it is given, so the graph keeps every array alive: it must live until the build is
    done.

    Parameters
    ----------
    tensorrt : TensorRT
    network : INetworkDefinition
    messages : Messages
        An open collection of TensorRT's log.
    dtype : str
        What the model computes in: ``"float16"``, ``"bfloat16"`` or ``"float32"``.
    """

    def __init__(self, tensorrt: TensorRT, network: Any, messages: Messages, *, dtype: str) -> None:
        self.tensorrt = tensorrt
        self.trt = tensorrt.module
        self.network = network
        self.dtype = dtype
        self._messages = messages
        self._arrays: list[np.ndarray[Any, Any]] = []

    def input(self, name: str, dtype: str, shape: Sequence[int]) -> Any:
        """Add a network input; ``-1`` in ``shape`` is given at run time."""
        tensor = self.network.add_input(name, self.tensorrt.data_type(dtype), tuple(shape))
        if tensor is None:
            self._messages.fail(BuildError, f"network input `{name}`: TensorRT refused it")
        return tensor

    def output(self, tensor: Any, name: str) -> None:
        """Make a tensor a network output with this name."""
        tensor.name = name
        self.network.mark_output(tensor)
        self.check(name)

    def layer(self, name: str, kind: str, *arguments: Any) -> Any:
        """Add a layer by ``INetworkDefinition.add_<kind>(*arguments)`` and return it.

        Raises
        ------
        BuildError
            TensorRT refused it. What is set on the layer afterwards, :meth:`result` checks.
        """
        layer = getattr(self.network, f"add_{kind}")(*arguments)
        if layer is None:
            self._messages.fail(BuildError, f"layer `{name}`: TensorRT refused {kind}")
        layer.name = name
        return layer

    def result(self, layer: Any) -> Any:
        """Return the output of a layer whose settings are complete.

        TensorRT looks at shapes and dtypes when it is asked for the output's shape, not when the layer is made. Asking here
        makes the layer at fault the one that is named. Raises :class:`BuildError`.
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
        """Add a layer that needs no settings, and return its output."""
        return self.result(self.layer(name, kind, *arguments))

    def check(self, name: str) -> None:
        """Raise :class:`BuildError` if TensorRT has logged an error, although it returned something."""
        self._messages.check(BuildError, f"layer `{name}`")

    def constant(self, name: str, array: np.ndarray[Any, Any]) -> Any:
        """Add a constant over the memory of ``array`` (copied only if it is not dense or not aligned)."""
        array = np.require(array, requirements=["C", "A"])
        self._arrays.append(array)
        data_type = self.tensorrt.data_type(dtype_name(array.dtype))
        weights = self.trt.Weights(data_type, array.ctypes.data, array.size)
        return self.op(name, "constant", array.shape, weights)

    def scalar(self, name: str, value: float, dtype: str, rank: int) -> Any:
        """Add a constant of shape ``[1] * rank`` (a true scalar for rank 0)."""
        return self.constant(name, np.full((1,) * rank, value, numpy_dtype(dtype)))

    def cast(self, name: str, tensor: Any, dtype: str) -> Any:
        """Return ``tensor`` in another dtype: itself if it has that one already."""
        data_type = self.tensorrt.data_type(dtype)
        return tensor if tensor.dtype == data_type else self.op(name, "cast", tensor, data_type)

    def elementwise(self, name: str, left: Any, operation: str, right: Any) -> Any:
        """Apply an ``ElementWiseOperation``, such as ``"SUM"``, to two tensors of equal rank and dtype."""
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
        """Transpose, reshape (0 copies a dimension, -1 is inferred), transpose: in this order, each where given."""
        layer = self.layer(name, "shuffle", tensor)
        if first_transpose is not None:
            layer.first_transpose = tuple(first_transpose)
        if reshape is not None:
            layer.reshape_dims = tuple(reshape)
        if second_transpose is not None:
            layer.second_transpose = tuple(second_transpose)
        return self.result(layer)
