"""``PackedWeight``: a matrix in 4 or 8 bits on a device, in the layout of the packed kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from trt_kvcache.kernels.packed_layout import (
    FRAGMENT_OUTPUTS,
    HALF_INPUTS,
    MIDDLES,
    STORED_SHAPES,
    TO_ROWS,
)
from trt_kvcache.kernels.packed_tensors import PackedTensors
from trt_kvcache.memory.base import Memory
from trt_kvcache.torch_engine.device_view import device_view
from trt_kvcache.torch_engine.packed_matrix import PackedMatrix
from trt_kvcache.torch_engine.packing import PackedArrays
from trt_kvcache.torch_engine.upload import Upload


@dataclass(frozen=True, kw_only=True)
class PackedWeight(PackedMatrix):
    """A matrix ``[outputs, inputs]`` of ``dtype``: ``(quantized value - zero point) * scale``. See ``PackedTensors`` for its fields."""

    dtype: torch.dtype
    memory: Memory
    kind: str
    outputs: int
    inputs: int
    group_shift: int
    values: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None

    @classmethod
    def of(cls, arrays: PackedArrays, dtype: str, upload: Upload, memory: Memory) -> PackedWeight:
        """Return the matrix on the device of ``memory``, to which ``upload`` copies."""
        return cls(
            dtype=getattr(torch, dtype),
            memory=memory,
            kind=arrays.kind,
            outputs=arrays.outputs,
            inputs=arrays.inputs,
            group_shift=arrays.group_shift,
            values=upload(arrays.values),
            scales=upload(arrays.scales),
            zero_points=None if arrays.zero_points is None else upload(arrays.zero_points),
        )

    @cached_property
    def tensors(self) -> PackedTensors:
        """See :class:`PackedMatrix`."""
        return PackedTensors(
            kind=self.kind,
            outputs=self.outputs,
            inputs=self.inputs,
            group_shift=self.group_shift,
            values=device_view(self.values, self.memory),
            scales=device_view(self.scales, self.memory),
            zero_points=None if self.zero_points is None else device_view(self.zero_points, self.memory),
        )

    @property
    def nbytes(self) -> int:
        """See :class:`PackedMatrix`."""
        return sum(tensor.nbytes for tensor in (self.values, self.scales, self.zero_points) if tensor is not None)

    def dequantized(self) -> torch.Tensor:
        """See :class:`PackedMatrix`."""
        values = self.values.view(len(self.values), -1, *STORED_SHAPES[self.kind])
        if self.kind == "int4":
            values = torch.stack((values & 15, values >> 4), dim=-1)
        else:
            values = values.view(torch.int8)
        values = values.permute(TO_ROWS[self.kind]).reshape(len(self.values) * FRAGMENT_OUTPUTS, -1)[: self.outputs, : self.inputs]
        group = torch.arange(self.inputs, device=values.device) // HALF_INPUTS >> self.group_shift
        zero_points = MIDDLES[self.kind] if self.zero_points is None else self._of_rows(self.zero_points).float()[:, group]
        return ((values.float() - zero_points) * self._of_rows(self.scales).float()[:, group]).to(self.dtype)

    def _of_rows(self, of_tiles: torch.Tensor) -> torch.Tensor:
        """Return scales or zero points ``[outputs, groups]``."""
        return of_tiles.permute(0, 3, 2, 1).reshape(-1, of_tiles.shape[1])[: self.outputs]


def joined(parts: Sequence[PackedWeight]) -> PackedWeight | None:
    """Return matrices of the same input with concatenated outputs, or None if the kernels would take them for different ones."""
    first = parts[0]
    if len(parts) == 1:
        return first
    formats = {(part.kind, part.inputs, part.group_shift, part.scales.dtype) for part in parts}
    if len(formats) > 1 or any(part.outputs % FRAGMENT_OUTPUTS for part in parts):
        return None
    has_zero_points = any(part.zero_points is not None for part in parts)
    return PackedWeight(
        dtype=first.dtype,
        memory=first.memory,
        kind=first.kind,
        outputs=sum(part.outputs for part in parts),
        inputs=first.inputs,
        group_shift=first.group_shift,
        values=torch.cat([part.values for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        zero_points=torch.cat([_zero_points(part) for part in parts]) if has_zero_points else None,
    )


def _zero_points(weight: PackedWeight) -> torch.Tensor:
    """Return zero points, those of a matrix without any too."""
    if weight.zero_points is not None:
        return weight.zero_points
    dtype = torch.uint8 if weight.kind == "int4" else torch.int8
    return torch.full(weight.scales.shape, MIDDLES[weight.kind], dtype=dtype, device=weight.scales.device)
