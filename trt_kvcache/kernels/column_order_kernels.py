"""Columns of rows in another order: the inputs of weights with act-order. For engines: nothing is checked."""

from __future__ import annotations

from typing import Any

from trt_kvcache.kernels.host_arrays import array_of
from trt_kvcache.kernels.kernel import Kernel
from trt_kvcache.kernels.launch import THREADS_PER_BLOCK, launch, starts_early
from trt_kvcache.memory.tensor import DeviceTensor


def _gather_on_host(x: DeviceTensor, order: DeviceTensor, out: DeviceTensor, stream: Any) -> None:
    array_of(out)[...] = array_of(x)[:, array_of(order)]


def _gather_on_device(x: DeviceTensor, order: DeviceTensor, out: DeviceTensor, stream: Any) -> None:
    rows, words = len(x), x.shape[1] // 2
    launch(
        out.memory,
        "decoder_layer",
        "gather_columns",
        (rows, -(-words // THREADS_PER_BLOCK), 1),
        (x.ptr, order.ptr, out.ptr, words),
        stream,
        programmatic_dependent_launch=starts_early(out.memory),
    )


#: Write column ``order[i]`` of rows ``[rows, columns]`` of 16-bit elements, an even number of columns, as column i of ``out``. On a GPU
#: ``order``, int32, is read early: the launch before this one on the stream may not write it.
gather_columns_kernel = Kernel(_gather_on_host, _gather_on_device)
