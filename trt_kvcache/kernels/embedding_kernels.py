"""Token embeddings: rows of a table by token ids."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from trt_kvcache.kernels.host_arrays import array_of
from trt_kvcache.kernels.kernel import Kernel
from trt_kvcache.kernels.launch import blocks_for, launch
from trt_kvcache.memory.shapes import ROW_GRANULE, dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor

#: Blocks along y at most.
_MAX_GRID_Y = 32768


def _embed_on_host(table: DeviceTensor, ids: DeviceTensor, out: DeviceTensor, stream: Any) -> None:
    rows, numbers, into = (array_of(tensor) for tensor in (table, ids, out))
    inside = (numbers >= 0) & (numbers < len(rows))
    into[...] = rows[np.where(inside, numbers, 0)]
    into[~inside] = 0


def _embed_on_device(table: DeviceTensor, ids: DeviceTensor, out: DeviceTensor, stream: Any) -> None:
    row = dense_nbytes(table.shape[1:], table.dtype)
    tokens = math.prod(ids.shape)
    grid_y = min(tokens, _MAX_GRID_Y)
    grid = (blocks_for(-(-row // ROW_GRANULE), tokens), grid_y, -(-tokens // grid_y))
    launch(table.memory, "embedding", "embed", grid, (table.ptr, len(table), row, ids.ptr, out.ptr, tokens), stream)


#: Gather rows of a table ``[vocab, hidden]`` by ids ``[B, s]`` int32 into ``[B, s, hidden]``; zeros for an id that is out of range.
#: It checks nothing: :class:`~trt_kvcache.ops.embedding_op.EmbeddingOp` does.
embed_kernel = Kernel(_embed_on_host, _embed_on_device)
