"""The lookup of token embeddings as a custom operation: the table may be a head's too, and is stored once."""

from collections.abc import Sequence
from typing import Any

from trt_kvcache.errors import DTypeError, ShapeError
from trt_kvcache.kernels.backend import backend_of
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.ops.custom_op import TensorType


class EmbeddingOp:
    """Gather rows: table ``[vocab, hidden]`` and int32 ids ``[B, s]`` to ``[B, s, hidden]``. No row for an id outside: zeros."""

    name = "embedding"

    def __init__(self) -> None:
        self.attributes: dict[str, int | float] = {}

    def outputs(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        """See :class:`~trt_kvcache.ops.custom_op.CustomOp`."""
        table, ids = inputs
        if len(table.shape) != 2 or len(ids.shape) != 2:
            raise ShapeError(f"embedding: expected a table [vocab, hidden] and ids [B, s], got {table.shape} and {ids.shape}.")
        if ids.dtype != "int32":
            raise DTypeError(f"embedding: expected int32 ids, got {ids.dtype}.")
        return (TensorType((*ids.shape, table.shape[1]), table.dtype),)

    def workspace_nbytes(self, inputs: Sequence[TensorType]) -> int:
        """See :class:`~trt_kvcache.ops.custom_op.CustomOp`."""
        return 0

    def enqueue(self, inputs: Sequence[DeviceTensor], outputs: Sequence[DeviceTensor], workspace: DeviceTensor, stream: Any) -> None:
        """Launch it."""
        table, ids = inputs
        backend_of(table.memory).embed(table, ids, outputs[0], stream)
