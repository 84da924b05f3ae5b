"""``Upload``: NumPy arrays as tensors of torch on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trt_kvcache._util.in_threads import for_each, row_slices

#: Bytes of a pinned buffer.
_STAGE = 32 << 20

#: Bytes that a thread copies at a time.
_PART = 1 << 20

_Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class _Stage:
    """A pinned buffer, and the event after the last copy from it."""

    buffer: torch.Tensor
    copied: torch.cuda.Event


class Upload:
    """Copies arrays to a device: to a GPU through two pinned buffers, of which threads fill one while the other is copied.

    The copies are ordered on torch's current stream.
    """

    # torch would copy from pageable memory at a third of the speed, after a first copy into new pages at a tenth.

    def __init__(self, device: torch.device, *, stage_nbytes: int = _STAGE) -> None:
        self.device, self._stage_nbytes = device, stage_nbytes
        self._stages: list[_Stage] = []

    def __call__(self, values: npt.NDArray[Any]) -> torch.Tensor:
        """Return an array on the device. torch does not know NumPy's bfloat16, so bytes are copied."""
        tensor = torch.empty(values.shape, dtype=getattr(torch, values.dtype.name), device=self.device)
        source: _Bytes = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        target = tensor.reshape(-1).view(torch.uint8)
        if self.device.type == "cpu":
            _copy(target.numpy(), source)
            return tensor
        with torch.cuda.device(self.device):
            for rows in row_slices(len(source), 1, self._stage_nbytes):
                self._copy_staged(target[rows], source[rows])
        return tensor

    def empty_bytes(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return bytes on the device, not written yet."""
        return torch.empty(shape, dtype=torch.uint8, device=self.device)

    def _copy_staged(self, target: torch.Tensor, source: _Bytes) -> None:
        if len(self._stages) < 2:
            buffer = torch.empty(self._stage_nbytes, dtype=torch.uint8, pin_memory=True)
            self._stages.append(_Stage(buffer, torch.cuda.Event()))
        else:
            self._stages.reverse()
        stage = self._stages[-1]
        stage.copied.synchronize()
        buffer = stage.buffer[: len(source)]
        _copy(buffer.numpy(), source)
        target.copy_(buffer, non_blocking=True)
        stage.copied.record()


def _copy(target: _Bytes, source: _Bytes) -> None:
    for_each(lambda part: np.copyto(target[part], source[part]), row_slices(len(source), 1, _PART))
