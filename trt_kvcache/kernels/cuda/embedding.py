"""Token embeddings on the device: ``plugins/embedding.cu``."""

import math
from typing import Any

from trt_kvcache.kernels.cuda.launch import blocks_for, launch
from trt_kvcache.memory.shapes import ROW_GRANULE, dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor

#: Blocks along y at most.
_MAX_GRID_Y = 32768


def embed(table: DeviceTensor, ids: DeviceTensor, out: DeviceTensor, stream: Any) -> None:
    row = dense_nbytes(table.shape[1:], table.dtype)
    tokens = math.prod(ids.shape)
    grid_y = min(tokens, _MAX_GRID_Y)
    grid = (blocks_for(-(-row // ROW_GRANULE), tokens), grid_y, -(-tokens // grid_y))
    launch(table.memory, "embedding", "embed", grid, (table.ptr, len(table), row, ids.ptr, out.ptr, tokens), stream)
