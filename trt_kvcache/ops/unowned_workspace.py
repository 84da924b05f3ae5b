"""A workspace of the attention kernels over memory that somebody else owns, such as TensorRT."""

from __future__ import annotations

from trt_kvcache.kernels.attention_workspace import MOST_BLOCKS, AttentionWorkspace, partials_shape
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.cuda_memory import CudaMemory
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.ops.attention_attributes import AttentionAttributes
from trt_kvcache.ops.attention_shapes import workspace_nbytes


class UnownedAllocation:
    """Bytes of somebody else (an :class:`~trt_kvcache.memory.base.Allocation` that owns nothing); ``ptr`` is set before each use."""

    closed = False

    def __init__(self, memory: Memory, nbytes: int) -> None:
        self.memory = memory
        self.nbytes = nbytes
        #: Address of the first byte.
        self.ptr = 0

    def close(self) -> None:
        """Do nothing: the owner frees them."""


class UnownedWorkspace(AttentionWorkspace):
    """A workspace that is somebody else's."""

    def __init__(self, fields: AttentionAttributes, memory: CudaMemory) -> None:
        self.blocks = MOST_BLOCKS * memory.multiprocessor_count
        #: The bytes.
        self.bytes = UnownedAllocation(memory, workspace_nbytes(fields, 1))
        self.partials = DeviceTensor(self.bytes, shape=partials_shape(self.blocks, fields.group, fields.head_dim), dtype="float32")
