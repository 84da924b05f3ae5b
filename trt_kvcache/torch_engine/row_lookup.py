"""``LookUp``: rows of a table by token ids. A table is on the device, or in pinned host memory, which a kernel reads over the bus."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from trt_kvcache._util.in_threads import for_each, row_slices
from trt_kvcache.kernels.embedding_kernels import embed_kernel
from trt_kvcache.memory.base import Memory
from trt_kvcache.torch_engine.device_views import DeviceViews

#: Elements that a thread copies at a time.
_PART = 1 << 20


@dataclass(frozen=True)
class HostRows:
    """A table ``[rows, ...]`` in pinned host memory. With unified addressing, the device reads it at the address of the host."""

    values: torch.Tensor

    @classmethod
    def of(cls, rows: npt.NDArray[Any], dtype: str, memory: Memory) -> HostRows:
        """Copy a table, in ``dtype``, which holds its values."""
        pinned = memory.staging(rows.shape, dtype)

        def copy(some: slice) -> None:
            pinned[some] = rows[some]

        for_each(copy, row_slices(len(rows), rows[:1].size, _PART))
        return cls(torch.from_numpy(pinned.view(np.uint8)).view(getattr(torch, dtype)))  # torch does not know NumPy's bfloat16


Table: TypeAlias = torch.Tensor | HostRows

#: Function of a table ``[rows, ...]`` and token ids ``[A, s]``: rows ``[A, s, ...]`` on the device, by operations of fixed shapes.
LookUp: TypeAlias = Callable[[Table, torch.Tensor], torch.Tensor]


def look_up(table: Table, ids: torch.Tensor) -> torch.Tensor:
    """Look up rows of a table on the device."""
    assert isinstance(table, torch.Tensor)
    return table.index_select(0, ids.flatten()).unflatten(0, ids.shape)


class KernelLookUp:
    """Looks up rows of a table on the device or in pinned host memory, by a kernel that is launched on ``stream``."""

    def __init__(self, views: DeviceViews, stream: Any) -> None:
        self._views, self._stream = views, stream

    def __call__(self, table: Table, ids: torch.Tensor) -> torch.Tensor:
        """See :data:`LookUp`."""
        if isinstance(table, torch.Tensor):
            return look_up(table, ids)
        out = torch.empty((*ids.shape, *table.values.shape[1:]), dtype=table.values.dtype, device=ids.device)
        embed_kernel(self._views.of(table.values), self._views.of(ids), self._views.of(out), self._stream)
        return out
