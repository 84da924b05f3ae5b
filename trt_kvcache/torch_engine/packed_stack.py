"""``PackedStack``: packed matrices of all experts of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from trt_kvcache.kernels.packed_tensors import PackedTensors
from trt_kvcache.torch_engine.packed_weight import PackedWeight, joined


@dataclass(frozen=True)
class PackedStack:
    """Matrices ``[count, outputs, inputs]``, of which ``whole`` has all outputs."""

    whole: PackedWeight
    count: int

    def __len__(self) -> int:
        """Number of matrices."""
        return self.count

    def __getitem__(self, index: int) -> PackedWeight:
        """Return a matrix, over the same memory."""
        return self._matrices[index]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Numbers of matrices, of outputs of each, and of inputs."""
        return self.count, self.whole.outputs // self.count, self.whole.inputs

    @cached_property
    def tensors(self) -> PackedTensors:
        """The matrices as the kernels take them."""
        return replace(self.whole.tensors, outputs=self.shape[1])

    @cached_property
    def _matrices(self) -> list[PackedWeight]:
        whole, outputs = self.whole, self.shape[1]
        zero_points = [None] * self.count if whole.zero_points is None else whole.zero_points.chunk(self.count)
        parts = zip(whole.values.chunk(self.count), whole.scales.chunk(self.count), zero_points, strict=True)
        return [replace(whole, outputs=outputs, values=values, scales=scales, zero_points=zeros) for values, scales, zeros in parts]


def stack_of(parts: Sequence[PackedWeight], count: int) -> PackedStack | None:
    """Return ``count`` matrices of as many parts each, one after another, or None if they are of several formats or no whole tiles."""
    if len({part.scales.dtype for part in parts}) > 1:
        parts = [replace(part, scales=part.scales.float()) for part in parts]
    whole = joined(parts)
    return None if whole is None else PackedStack(whole, count)


#: Matrices ``[count, outputs, inputs]``.
MatrixStack = torch.Tensor | PackedStack
