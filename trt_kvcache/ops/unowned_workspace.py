"""A workspace for the attention kernels in memory that this package does not own, such as that which TensorRT passes to a plugin."""

from __future__ import annotations

from trt_kvcache.kernels.attention_workspace import AttentionWorkspace, partials_shape
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.cuda_memory import CudaMemory
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.ops.attention_attributes import AttentionAttributes
from trt_kvcache.ops.attention_shapes import workspace_nbytes


class UnownedAllocation:
    """Memory that this package does not own (implements :class:`~trt_kvcache.memory.base.Allocation`). Set ``ptr`` before each use."""

    closed = False

    def __init__(self, memory: Memory, nbytes: int) -> None:
        self.memory = memory
        self.nbytes = nbytes
        self.ptr = 0

    def close(self) -> None:
        """Do nothing: the owner frees the memory."""


class UnownedWorkspace(AttentionWorkspace):
    """A workspace in memory that this package does not own. Set ``bytes.ptr`` before each use."""

    def __init__(self, attributes: AttentionAttributes, memory: CudaMemory) -> None:
        self.bytes = UnownedAllocation(memory, workspace_nbytes(attributes))
        count, group = memory.multiprocessor_count, attributes.group
        partials = DeviceTensor(self.bytes, shape=partials_shape(count, group, attributes.head_dim), dtype="float32")
        self._set(partials, count, group)
