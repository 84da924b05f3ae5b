"""``PluginEnqueue``: the kernel launches of one enqueue of the plugin, at addresses that TensorRT gives."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

from trt_kvcache.engine.step_ancestors import ANCESTORS
from trt_kvcache.errors import CapacityError, ShapeError
from trt_kvcache.kernels.attention_kernels import attend_kernel, flagged_nbytes
from trt_kvcache.kernels.attention_params import AttentionParams
from trt_kvcache.kernels.token_tree import MAX_TREE_TOKENS
from trt_kvcache.memory.cuda_driver import check
from trt_kvcache.memory.cuda_memory import CudaMemory
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.ops.attention_attributes import AttentionAttributes
from trt_kvcache.ops.borrowed_workspace import MAX_MULTIPROCESSORS, BorrowedAllocation, BorrowedWorkspace
from trt_kvcache.ops.int32_packing import unpacked_shape
from trt_kvcache.trt.plugin.plugin_tensors import inputs_of, outputs_of

_LOG = logging.getLogger("trt_kvcache.tensorrt")


class PluginEnqueue:
    """Launches the kernels for inputs of certain shapes. Made when the shapes change; :meth:`run` then allocates nothing."""

    def __init__(self, attributes: AttentionAttributes, dtype: str, shapes: Mapping[str, Sequence[int]], memory: CudaMemory) -> None:
        if memory.multiprocessor_count > MAX_MULTIPROCESSORS:
            raise CapacityError(
                f"{memory.device}: expected at most {MAX_MULTIPROCESSORS} multiprocessors, got {memory.multiprocessor_count}."
            )
        self._memory = memory
        self._inputs: list[BorrowedAllocation] = []
        dtypes = {name: dtype if expected == "q" else expected for name, (_, expected) in inputs_of(attributes).items()}
        if attributes.kv_dtype is not None:
            dtypes["cache"] = attributes.kv_dtype
            shapes = {**shapes, "cache": unpacked_shape(shapes["cache"])}
        tensors: dict[str, Any] = {name: self._tensor(shape, dtypes[name]) for name, shape in shapes.items()}
        q, table = tensors["q"], tensors.pop(ANCESTORS, None)
        takes_trees = table is not None and 1 < q.shape[1] <= MAX_TREE_TOKENS
        if table is not None and len(table) < len(q):  # not sooner: when TensorRT builds, the most slots are an estimate
            raise ShapeError(f"{ANCESTORS}: expected {len(q)} slots or more, got {len(table)}.")
        self._out = BorrowedAllocation(memory, q.nbytes)
        aliases = [like for like, aliased in outputs_of(attributes).values() if aliased]
        self._updated = [(tuple(shapes).index(like), output) for output, like in enumerate(aliases, 1)]
        self._workspace = BorrowedWorkspace(attributes, memory)
        self.is_decode = q.shape[1] == 1
        self._call = AttentionParams(
            **{"new_lengths": None, "cos_sin": None, "kv_scales": None} | tensors,
            out=DeviceTensor(self._out, shape=q.shape, dtype=dtype),
            scale=attributes.score_scale,
            window=attributes.window,
            softcap=attributes.softcap,
            ancestors=DeviceTensor(table.allocation, shape=q.shape[:2], dtype="int64") if takes_trees else None,
        )
        self._flagged_nbytes = flagged_nbytes(self._call) if q.shape[0] else 0

    def _tensor(self, shape: Sequence[int], dtype: str) -> DeviceTensor:
        """Return a tensor whose address is set at each run."""
        self._inputs.append(BorrowedAllocation(self._memory, dense_nbytes(shape, dtype)))
        return DeviceTensor(self._inputs[-1], shape=shape, dtype=dtype)

    def run(self, inputs: Sequence[int], outputs: Sequence[int], workspace: int, stream: int) -> None:
        """Launch the kernels at device addresses in the order of the plugin; does not wait.

        If TensorRT copied an aliased tensor, the whole input is copied to the output first, and the kernels work on the output.
        """
        for allocation, address in zip(self._inputs, inputs, strict=True):
            allocation.ptr = address
        for position, output in self._updated:
            if outputs[output] != inputs[position]:
                copy_updated(outputs[output], self._inputs[position], stream)
        self._out.ptr = outputs[0]
        self._workspace.bytes.ptr = workspace
        if not self._call.q.shape[0]:
            return
        if self._flagged_nbytes:
            zero(workspace, self._flagged_nbytes, stream)
        attend_kernel(self._call, self._workspace, stream_of(stream))


@cache
def _warn_of_copies() -> None:
    """Warn once in a process: the copies are correct, but each costs the time of reading and writing a whole cache."""
    _LOG.warning("TensorRT gave a plugin layer separate memory for the cache's output: each step copies the layer's whole cache.")


def copy_updated(address: int, updated: BorrowedAllocation, stream: int) -> None:
    """Copy an input that is updated in place to the address of its output, where TensorRT did not share its memory, and use that."""
    _warn_of_copies()
    _copy(address, updated.ptr, updated.nbytes, stream)
    updated.ptr = address


def _copy(destination: int, source: int, nbytes: int, stream: int) -> None:
    """Copy device memory, ordered on a stream."""
    from cuda.bindings import driver

    check(driver.cuMemcpyDtoDAsync(destination, source, nbytes, stream))


def zero(ptr: int, nbytes: int, stream: int) -> None:
    """Fill device memory with zeros, ordered on a stream."""
    from cuda.bindings import driver

    check(driver.cuMemsetD8Async(ptr, 0, nbytes, stream))


@lru_cache(maxsize=64)
def stream_of(handle: int) -> Any:
    """Return a ``cudaStream_t`` as a stream of cuda.core, which does not own it."""
    from cuda.core import Stream

    return Stream.from_handle(handle)


def current_memory() -> CudaMemory:
    """Return the memory of the device that is current in this thread; TensorRT makes the engine's device current."""
    from cuda.bindings import driver

    return _memory_of(int(check(driver.cuCtxGetDevice())))


@cache
def _memory_of(device: int) -> CudaMemory:
    """Return the memory of a device; one object per device."""
    return CudaMemory(device)
