"""Token embedding as a custom operation, so that a table which the LM head also uses (tied embeddings) is in memory only once."""

from collections.abc import Sequence
from typing import Any

from trt_kvcache.errors import DTypeError, ShapeError
from trt_kvcache.kernels.embedding_kernels import embed_kernel
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.ops.custom_op import TensorType


class EmbeddingOp:
    """Look up the rows of token ids in an embedding table (implements :class:`~trt_kvcache.ops.custom_op.CustomOp`).

    Inputs: the table ``[vocab, hidden]`` and int32 token ids ``[B, s]``. Output: ``[B, s, hidden]`` in the dtype of the table; zeros for
    ids outside the table.

    Examples
    --------
    >>> from trt_kvcache.ops.custom_op import TensorType
    >>> EmbeddingOp().outputs([TensorType((320, 96), "float16"), TensorType((-1, -1), "int32")])
    (TensorType(shape=(-1, -1, 96), dtype='float16', alias=None),)
    """

    name = "embedding"

    def __init__(self) -> None:
        self.attributes: dict[str, int | float] = {}

    def outputs(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        """See :meth:`CustomOp.outputs <trt_kvcache.ops.custom_op.CustomOp.outputs>`."""
        table, ids = inputs
        if len(table.shape) != 2 or len(ids.shape) != 2:
            raise ShapeError(f"embedding: expected a table [vocab, hidden] and ids [B, s], got {table.shape} and {ids.shape}.")
        if ids.dtype != "int32":
            raise DTypeError(f"embedding: expected int32 ids, got {ids.dtype}.")
        return (TensorType((*ids.shape, table.shape[1]), table.dtype),)

    def workspace_nbytes(self, inputs: Sequence[TensorType]) -> int:
        """See :meth:`CustomOp.workspace_nbytes <trt_kvcache.ops.custom_op.CustomOp.workspace_nbytes>`. There is none."""
        return 0

    def enqueue(self, inputs: Sequence[DeviceTensor], outputs: Sequence[DeviceTensor], workspace: DeviceTensor, stream: Any) -> None:
        """See :meth:`CustomOp.enqueue <trt_kvcache.ops.custom_op.CustomOp.enqueue>`. One launch."""
        table, ids = inputs
        embed_kernel(table, ids, outputs[0], stream)
