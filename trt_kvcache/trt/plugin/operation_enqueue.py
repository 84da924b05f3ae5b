"""``OperationEnqueue``: the launch of a custom operation at addresses that TensorRT gives."""

from __future__ import annotations

from collections.abc import Sequence

from trt_kvcache.memory.cuda_memory import CudaMemory
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.ops.borrowed_workspace import BorrowedAllocation
from trt_kvcache.ops.custom_op import CustomOp, TensorType
from trt_kvcache.trt.plugin import enqueue


class OperationEnqueue:
    """Launches an operation on inputs of certain shapes. Made when the shapes change; :meth:`run` then allocates nothing."""

    def __init__(self, op: CustomOp, inputs: Sequence[TensorType], memory: CudaMemory) -> None:
        self._op = op
        self._memory = memory
        self._inputs = [self._tensor(one) for one in inputs]
        self._types = op.outputs(inputs)
        self._outputs = [self._inputs[one.alias] if one.alias is not None else self._tensor(one) for one in self._types]
        self._workspace = self._tensor(TensorType((op.workspace_nbytes(inputs),), "uint8"))

    def _tensor(self, one: TensorType) -> tuple[BorrowedAllocation, DeviceTensor]:
        """Return a tensor whose address is set at each run."""
        allocation = BorrowedAllocation(self._memory, dense_nbytes(one.shape, one.dtype))
        return allocation, DeviceTensor(allocation, shape=one.shape, dtype=one.dtype)

    def run(self, inputs: Sequence[int], outputs: Sequence[int], workspace: int, stream: int) -> None:
        """Launch the operation at device addresses; does not wait. Its workspace is zeroed first: TensorRT lends it to other layers too."""
        for (allocation, _), address in zip(self._inputs, inputs, strict=True):
            allocation.ptr = address
        for one, (allocation, _), address in zip(self._types, self._outputs, outputs, strict=True):
            if one.alias is not None and allocation.ptr != address:
                enqueue.copy_updated(address, allocation, stream)
            allocation.ptr = address
        lent, scratch = self._workspace
        lent.ptr = workspace
        if lent.nbytes:
            enqueue.zero(workspace, lent.nbytes, stream)
        tensors, results = ([tensor for _, tensor in side] for side in (self._inputs, self._outputs))
        self._op.enqueue(tensors, results, scratch, enqueue.stream_of(stream))
