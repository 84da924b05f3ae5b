"""Updates of products of a few rows by LoRA adapters. Each slot has its own adapter or none.

The A matrices of all adapters of one linear layer are concatenated along the ranks, and so are the B matrices. The ranks of an adapter are
padded to a multiple of 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from trt_kvcache.kernels.host_arrays import array_of
from trt_kvcache.kernels.kernel import Kernel
from trt_kvcache.kernels.launch import launch, starts_early
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.tensor import DeviceTensor

#: The ranks of an adapter in the kernels: a multiple of 16 bytes.
RANK_GRANULE = 8

#: Threads of a block, as in ``plugins/linear/adapters.cu``.
_RANK_THREADS, _OUTPUT_THREADS = 256, 128

#: Rows of a slot that a block handles.
_GROUP_ROWS = 4

_SOURCE = "linear_adapters"


@dataclass(frozen=True, kw_only=True)
class UpdateTensors:
    """Updates of a map by adapters. A part is some of its outputs, with ranks of their own: of fused maps, each one is a part."""

    a: DeviceTensor  # [ranks, inputs]
    b: DeviceTensor  # of all parts, [outputs, ranks] each, one after another
    owners: DeviceTensor  # int32 [ranks]: number of the adapter
    parts: DeviceTensor  # int64 [parts, 4]: first output, outputs, first element of b, ranks
    starts: DeviceTensor  # int32 [parts, adapters + 2]: first rank of each number, where 0 has none, and the end
    max_outputs: int  # of a part

    @property
    def memory(self) -> Memory:
        """Memory of the tensors."""
        return self.a.memory


def _ranks_on_host(update: UpdateTensors, x: DeviceTensor, numbers: DeviceTensor, ranks: DeviceTensor, stream: Any) -> None:
    rows = np.repeat(array_of(numbers), len(x) // len(numbers))
    of_row = rows[:, None] == array_of(update.owners)
    products = array_of(x).astype(np.float32) @ array_of(update.a).astype(np.float32).T
    array_of(ranks)[of_row] = products[of_row]


def _outputs_on_host(update: UpdateTensors, ranks: DeviceTensor, numbers: DeviceTensor, out: DeviceTensor, stream: Any) -> None:
    into, b = array_of(out), array_of(update.b)
    for (first_output, outputs, first, width), starts in zip(array_of(update.parts), array_of(update.starts), strict=True):
        of_part = b[first : first + outputs * width].reshape(outputs, width).astype(np.float32)
        for row, number in enumerate(np.repeat(array_of(numbers), len(into) // len(numbers))):
            begin, end = starts[number : number + 2]
            if begin < end:
                change = of_part[:, begin - starts[0] : end - starts[0]] @ array_of(ranks)[row, begin:end]
                into[row, first_output : first_output + outputs] += change.astype(into.dtype)


def _ranks_on_device(update: UpdateTensors, x: DeviceTensor, numbers: DeviceTensor, ranks: DeviceTensor, stream: Any) -> None:
    slot_rows = len(x) // len(numbers)
    launch(
        x.memory,
        _SOURCE,
        f"adapter_ranks_{x.dtype}",
        (ranks.shape[1], len(numbers) * -(-slot_rows // _GROUP_ROWS), 1),
        (x.ptr, update.a.ptr, update.owners.ptr, numbers.ptr, ranks.ptr, x.shape[1] // RANK_GRANULE, slot_rows),
        stream,
        threads=_RANK_THREADS,
        programmatic_dependent_launch=starts_early(x.memory),
    )


def _outputs_on_device(update: UpdateTensors, ranks: DeviceTensor, numbers: DeviceTensor, out: DeviceTensor, stream: Any) -> None:
    slot_rows, adapters = len(out) // len(numbers), update.starts.shape[1] - 2
    tensors = (ranks.ptr, update.b.ptr, update.parts.ptr, update.starts.ptr, numbers.ptr, out.ptr)
    launch(
        out.memory,
        _SOURCE,
        f"adapter_outputs_{out.dtype}",
        (-(-update.max_outputs // _OUTPUT_THREADS), len(update.parts), len(numbers) * -(-slot_rows // _GROUP_ROWS)),
        (*tensors, out.shape[1], ranks.shape[1], adapters, slot_rows),
        stream,
        threads=_OUTPUT_THREADS,
        programmatic_dependent_launch=starts_early(out.memory),
    )


#: Write the products of rows ``x`` ``[A * s, inputs]`` with A into ``ranks`` float32 ``[A * s, ranks]``, for the ranks of the adapter of
#: each slot, by ``numbers`` int32 ``[A]``. On a GPU, other ranks are not written.
adapter_ranks_kernel = Kernel(_ranks_on_host, _ranks_on_device)

#: Add the products of these ranks with B to ``out`` ``[A * s, outputs]``. Rows of slots without an adapter stay as they are, bit for bit.
adapter_outputs_kernel = Kernel(_outputs_on_host, _outputs_on_device)
