"""``CustomOp``: an operation that this package launches itself, between the segments of an engine."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from trt_kvcache.memory.host_memory import HostMemory
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor


class TensorType(NamedTuple):
    """Shape (``-1`` where it is given at run time) and dtype of a tensor; of an output also the input whose memory it shares."""

    shape: tuple[int, ...]
    dtype: str
    alias: int | None = None


class CustomOp(Protocol):
    """An operation over dense tensors: a few lines of Python around a launch.

    TensorRT for RTX has no plugin layers, so a network that needs one is cut there, and the engine enqueues segment, operation,
    segment. Over host memory the operation runs its NumPy twin (:func:`run_on_host`).
    """

    @property
    def name(self) -> str:
        """What an engine folder calls it."""

    @property
    def attributes(self) -> Mapping[str, int | float]:
        """What it is made with, as plain numbers."""

    def outputs(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        """Return the outputs for inputs of these shapes. Raises ShapeError or DTypeError where they do not fit."""

    def workspace_nbytes(self, inputs: Sequence[TensorType]) -> int:
        """Return the bytes of workspace for inputs of these shapes.

        The workspace is zeroed when it is made, and only operations of one name share it, one after another: what must be zero
        before a launch must be zero after it.
        """

    def enqueue(self, inputs: Sequence[DeviceTensor], outputs: Sequence[DeviceTensor], workspace: DeviceTensor, stream: Any) -> None:
        """Launch it on ``stream``. Neither waits nor allocates; the tensors were checked by :meth:`outputs` when they were bound."""


def run_on_host(op: CustomOp, *arrays: Any) -> tuple[Any, ...]:
    """Run the NumPy twin of an operation on arrays, which stay as they are; return its outputs as new arrays."""
    memory = HostMemory()
    stream = memory.create_stream()
    inputs = [memory.to_device(array, stream=stream) for array in arrays]
    types = [TensorType(tensor.shape, tensor.dtype) for tensor in inputs]
    made = [
        DeviceTensor(memory.allocate(dense_nbytes(one.shape, one.dtype), stream=stream), shape=one.shape, dtype=one.dtype)
        if one.alias is None
        else inputs[one.alias]
        for one in op.outputs(types)
    ]
    nbytes = op.workspace_nbytes(types)
    workspace = DeviceTensor(memory.allocate(nbytes, zeroed=True, stream=stream), shape=(nbytes,), dtype="uint8")
    op.enqueue(inputs, made, workspace, stream)
    return tuple(tensor.numpy() for tensor in made)
