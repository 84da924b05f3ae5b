"""Token embeddings in host memory."""

from typing import Any

import numpy as np

from trt_kvcache.kernels.host.arrays import array_of
from trt_kvcache.memory.tensor import DeviceTensor


def embed(table: DeviceTensor, ids: DeviceTensor, out: DeviceTensor, stream: Any) -> None:
    rows, numbers, into = (array_of(tensor) for tensor in (table, ids, out))
    inside = (numbers >= 0) & (numbers < len(rows))
    into[...] = rows[np.where(inside, numbers, 0)]
    into[~inside] = 0
