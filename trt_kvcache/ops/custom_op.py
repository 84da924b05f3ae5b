"""``CustomOp``: an operation of this package or of a user, in a plugin layer or between the segments of a TensorRT engine."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from trt_kvcache.memory.host_memory import HostMemory
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor


class TensorType(NamedTuple):
    """Shape and dtype of a tensor.

    Parameters
    ----------
    shape : tuple of int
        ``-1`` for sizes that are known at run time only.
    dtype : str
        As in :mod:`trt_kvcache.dtypes`.
    alias : int, optional
        For an output that shares memory with an input: the index of that input.
    """

    shape: tuple[int, ...]
    dtype: str
    alias: int | None = None


class CustomOp(Protocol):
    """An operation over contiguous tensors: shape inference, and a launch on a stream.

    In one plan it runs in a plugin layer, ``CustomOperation``. In an engine in segments it runs before a segment or between two. On
    host memory (``tensor.memory.is_host``) it computes the same with NumPy.
    """

    @property
    def name(self) -> str:
        """The name that engine folders use for it."""

    @property
    def attributes(self) -> Mapping[str, int | float]:
        """The arguments that it was created with, by name; plain numbers."""

    def outputs(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        """Infer the outputs.

        Parameters
        ----------
        inputs : sequence of TensorType
            When an engine is built or opened, sizes may be ``-1``; before an enqueue all are known.

        Returns
        -------
        tuple of TensorType
            Shape, dtype and alias of each output, in the order in which :meth:`enqueue` gets them. A size is ``-1`` if it depends on
            one that is.

        Raises
        ------
        ShapeError, DTypeError
            The inputs do not fit the operation.
        """

    def workspace_nbytes(self, inputs: Sequence[TensorType]) -> int:
        """Return the size of the workspace.

        Parameters
        ----------
        inputs : sequence of TensorType
            The inputs of the largest enqueue.

        Returns
        -------
        int
            Bytes; 0 for none.

        Notes
        -----
        Between segments the workspace is zeroed once, when it is allocated. Operations of one name share it and run one after another, so
        bytes that must be zero before a launch must be zero again after it. In a plugin layer it is zeroed at each launch.
        """

    def enqueue(self, inputs: Sequence[DeviceTensor], outputs: Sequence[DeviceTensor], workspace: DeviceTensor, stream: Any) -> None:
        """Launch the operation; neither waits nor allocates.

        Parameters
        ----------
        inputs, outputs : sequence of DeviceTensor
            Contiguous, and checked by :meth:`outputs` when they were bound. Outputs with an alias are at the address of their input.
        workspace : DeviceTensor uint8
            At least :meth:`workspace_nbytes`.
        stream : cuda.core.Stream or cuda.core.GraphBuilder
            Stream of the launch.
        """


def run_on_host(op: CustomOp, *arrays: Any) -> tuple[Any, ...]:
    """Run an operation with NumPy, in host memory.

    Parameters
    ----------
    op : CustomOp
        The operation.
    *arrays : ndarray
        Its inputs. They are copied, and stay as they are.

    Returns
    -------
    tuple of ndarray
        The outputs, as new arrays.

    Raises
    ------
    ShapeError, DTypeError
        The inputs do not fit the operation.

    Examples
    --------
    >>> import numpy as np
    >>> from trt_kvcache.ops.embedding_op import EmbeddingOp
    >>> table = np.arange(6, dtype="float32").reshape(3, 2)
    >>> (hidden,) = run_on_host(EmbeddingOp(), table, np.array([[2, 0]], "int32"))
    >>> hidden.tolist()
    [[[4.0, 5.0], [0.0, 1.0]]]
    """
    memory = HostMemory()
    stream = memory.create_stream()
    inputs = [memory.to_device(array, stream=stream) for array in arrays]
    types = [TensorType(tensor.shape, tensor.dtype) for tensor in inputs]
    outputs = [
        DeviceTensor(memory.allocate(dense_nbytes(output.shape, output.dtype), stream=stream), shape=output.shape, dtype=output.dtype)
        if output.alias is None
        else inputs[output.alias]
        for output in op.outputs(types)
    ]
    nbytes = op.workspace_nbytes(types)
    workspace = DeviceTensor(memory.allocate(nbytes, zeroed=True, stream=stream), shape=(nbytes,), dtype="uint8")
    op.enqueue(inputs, outputs, workspace, stream)
    return tuple(tensor.numpy() for tensor in outputs)
