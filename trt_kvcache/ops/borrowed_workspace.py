"""``BorrowedWorkspace``: a workspace of the attention kernels in memory of another owner, such as the one that TensorRT gives a plugin."""

from __future__ import annotations

from trt_kvcache.kernels.attention_workspace import AttentionWorkspace, partials_shape
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.cuda_memory import CudaMemory
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.ops.attention_attributes import AttentionAttributes

#: Most multiprocessors of a GPU. The workspace is sized for this many, so that an engine may run on another GPU than it was built on.
MAX_MULTIPROCESSORS = 256


def workspace_nbytes(attributes: AttentionAttributes) -> int:
    """Return the size of the workspace: room for the partial results of a launch on any GPU of up to :data:`MAX_MULTIPROCESSORS`."""
    return dense_nbytes(partials_shape(MAX_MULTIPROCESSORS, attributes.group, attributes.head_dim), "float32")


class BorrowedAllocation:
    """Memory of another owner (implements :class:`~trt_kvcache.memory.base.Allocation`). Set ``ptr`` before each use."""

    closed = False

    def __init__(self, memory: Memory, nbytes: int) -> None:
        self.memory = memory
        self.nbytes = nbytes
        self.ptr = 0

    def close(self) -> None:
        """Do nothing: the owner frees the memory."""


class BorrowedWorkspace(AttentionWorkspace):
    """A workspace in memory of another owner. Set ``bytes.ptr`` before each use."""

    def __init__(self, attributes: AttentionAttributes, memory: CudaMemory) -> None:
        self.bytes = BorrowedAllocation(memory, workspace_nbytes(attributes))
        count, group = memory.multiprocessor_count, attributes.group
        partials = DeviceTensor(self.bytes, shape=partials_shape(count, group, attributes.head_dim), dtype="float32")
        self._set(partials, count, group)
