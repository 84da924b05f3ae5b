"""``PluginEnqueue``: the launches of one enqueue, over memory that is TensorRT's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

from trt_kvcache.errors import BindingError, CapacityError
from trt_kvcache.kernels.attention_call import AttentionCall
from trt_kvcache.kernels.backend import backend_of
from trt_kvcache.memory.cuda_driver import check
from trt_kvcache.memory.cuda_memory import CudaMemory
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.ops.attention_attributes import AttentionAttributes
from trt_kvcache.ops.attention_shapes import INPUTS, MAX_MULTIPROCESSORS
from trt_kvcache.ops.unowned_workspace import UnownedAllocation, UnownedWorkspace


class PluginEnqueue:
    """Launches for inputs of these shapes, which were checked. Made once for them; then :meth:`run` allocates nothing.

    Parameters
    ----------
    fields : AttentionAttributes
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

    def __init__(self, fields: AttentionAttributes, dtype: str, shapes: Mapping[str, Sequence[int]], memory: CudaMemory) -> None:
        if memory.multiprocessor_count > MAX_MULTIPROCESSORS:
            raise CapacityError(
                f"{memory.device}: expected at most {MAX_MULTIPROCESSORS} multiprocessors, got {memory.multiprocessor_count}."
            )
        self._memory = memory
        self._bytes: list[UnownedAllocation] = []
        tensors: dict[str, Any] = {
            name: self._tensor(shape, dtype if INPUTS[name][1] == "q" else INPUTS[name][1]) for name, shape in shapes.items()
        }
        q = tensors["q"]
        self._out = UnownedAllocation(memory, q.nbytes)
        self._cache = tuple(shapes).index("cache")
        self._workspace = UnownedWorkspace(fields, memory)
        #: Whether each slot has one new token.
        self.decodes = q.shape[1] == 1
        self._call = AttentionCall(
            **{"new_lengths": None, "cos_sin": None} | tensors,
            out=DeviceTensor(self._out, shape=q.shape, dtype=dtype),
            scale=fields.score_scale,
            window=fields.window,
            softcap=fields.softcap,
        )

    def _tensor(self, shape: Sequence[int], dtype: str) -> DeviceTensor:
        self._bytes.append(UnownedAllocation(self._memory, dense_nbytes(shape, dtype)))
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
