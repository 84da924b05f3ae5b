"""``AttentionStep``: the launches of one enqueue, over memory that is TensorRT's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

from trt_kvcache.errors import BindingError, CapacityError
from trt_kvcache.kernels.attention_params import AttentionParams
from trt_kvcache.kernels.attention_workspace import MAX_BLOCKS_PER_SM, AttentionWorkspace, partials_shape
from trt_kvcache.kernels.backend import backend_of
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.cuda import CudaMemory
from trt_kvcache.memory.cuda_driver import check
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.ops.attention_fields import AttentionFields
from trt_kvcache.ops.attention_shapes import INPUTS, MOST_MULTIPROCESSORS, workspace_nbytes


class BorrowedBytes:
    """Bytes of somebody else (an :class:`~trt_kvcache.memory.base.Allocation` that owns nothing); ``ptr`` is set before each use."""

    closed = False

    def __init__(self, memory: Memory, nbytes: int) -> None:
        self.memory = memory
        self.nbytes = nbytes
        #: Address of the first byte.
        self.ptr = 0

    def close(self) -> None:
        """Do nothing: the owner frees them."""


class BorrowedWorkspace(AttentionWorkspace):
    """A workspace that is somebody else's."""

    def __init__(self, fields: AttentionFields, memory: CudaMemory) -> None:
        self.blocks = MAX_BLOCKS_PER_SM * memory.multiprocessor_count
        #: The bytes.
        self.bytes = BorrowedBytes(memory, workspace_nbytes(fields, 1))
        self.partials = DeviceTensor(self.bytes, shape=partials_shape(self.blocks, fields.group, fields.head_dim), dtype="float32")


class AttentionStep:
    """Launches for inputs of these shapes, which were checked. Made once for them; then :meth:`run` allocates nothing.

    Parameters
    ----------
    fields : AttentionFields
    dtype : str
        Of q.
    shapes : mapping of str to sequence of int
        Of the inputs, in order.
    memory : CudaMemory
        Of the device.

    Raises
    ------
    CapacityError
        The GPU has more multiprocessors than the workspace is made for.
    """

    def __init__(self, fields: AttentionFields, dtype: str, shapes: Mapping[str, Sequence[int]], memory: CudaMemory) -> None:
        if memory.multiprocessor_count > MOST_MULTIPROCESSORS:
            raise CapacityError(
                f"{memory.device}: expected at most {MOST_MULTIPROCESSORS} multiprocessors, got {memory.multiprocessor_count}."
            )
        self._memory = memory
        self._bytes: list[BorrowedBytes] = []
        tensors: dict[str, Any] = {
            name: self._tensor(shape, dtype if INPUTS[name][1] == "q" else INPUTS[name][1]) for name, shape in shapes.items()
        }
        q = tensors["q"]
        self._out = BorrowedBytes(memory, q.nbytes)
        self._cache = tuple(shapes).index("cache")
        self._workspace = BorrowedWorkspace(fields, memory)
        #: Whether each slot has one new token.
        self.decodes = q.shape[1] == 1
        self._call = AttentionParams(
            **{"new_lengths": None, "cos_sin": None} | tensors,
            out=DeviceTensor(self._out, shape=q.shape, dtype=dtype),
            scale=fields.factor,
            window=fields.window,
            softcap=fields.softcap,
        )

    def _tensor(self, shape: Sequence[int], dtype: str) -> DeviceTensor:
        self._bytes.append(BorrowedBytes(self._memory, dense_nbytes(shape, dtype)))
        return DeviceTensor(self._bytes[-1], shape=shape, dtype=dtype)

    def run(self, inputs: Sequence[int], outputs: Sequence[int], workspace: int, stream: int) -> None:
        """Launch the kernels on a stream.

        Parameters
        ----------
        inputs, outputs : sequence of int
            Addresses on the device.
        workspace : int
            Address of ``workspace_nbytes``; what is there means nothing before and after.
        stream : int
            Address of the CUstream.

        Raises
        ------
        BindingError
            The cache that comes out is not the one that goes in. Nothing was launched.
        CudaError
            A kernel could not be loaded or launched.
        """
        if outputs[1] != inputs[self._cache]:
            raise BindingError(
                f"cache: expected the output at the address of the input {inputs[self._cache]:#x}, got {outputs[1]:#x}. "
                "Build with allow_aliasing, and bind both to one address."
            )
        for place, ptr in zip(self._bytes, inputs, strict=True):
            place.ptr = ptr
        self._out.ptr = outputs[0]
        self._workspace.bytes.ptr = workspace
        if not self._call.q.shape[0]:
            return
        if self.decodes:
            _zero(self._workspace.partials.ptr, self._workspace.zeroed_nbytes, stream)
        backend_of(self._memory).attend(self._call, self._workspace, _stream(stream))


def _zero(ptr: int, nbytes: int, stream: int) -> None:
    from cuda.bindings import driver

    check(driver.cuMemsetD8Async(ptr, 0, nbytes, stream))


@lru_cache(maxsize=64)
def _stream(handle: int) -> Any:
    """Return a stream of somebody else as one of cuda.core, which neither owns nor closes it."""
    from cuda.core import Stream

    return Stream.from_handle(handle)


def current_memory() -> CudaMemory:
    """Return the memory of the device that is current in this thread: TensorRT makes its own so. Raises CudaError."""
    from cuda.bindings import driver

    return _memory_of(int(check(driver.cuCtxGetDevice())))


@cache
def _memory_of(device: int) -> CudaMemory:
    return CudaMemory(device)
