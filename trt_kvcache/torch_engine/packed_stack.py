"""``PackedStack``: packed matrices of all experts of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from trt_kvcache.kernels import packed_tensors
from trt_kvcache.torch_engine.joined_matrices import joined_matrices
from trt_kvcache.torch_engine.packed_matrix import PackedMatrix
from trt_kvcache.torch_engine.packed_weight import PackedWeight


@dataclass(frozen=True)
class PackedStack:
    """Matrices ``[count, outputs, inputs]``, of which ``whole`` has all outputs."""

    whole: PackedMatrix
    count: int

    def __len__(self) -> int:
        """Number of matrices."""
        return self.count

    def __getitem__(self, index: int) -> PackedMatrix:
        """Return a matrix, over the same memory."""
        return self._matrices[index]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Numbers of matrices, of outputs of each, and of inputs."""
        return self.count, self.whole.outputs // self.count, self.whole.inputs

    @cached_property
    def tensors(self) -> packed_tensors.PackedMatrix:
        """The matrices as the kernels take them."""
        whole: Any = self.whole.tensors
        found: packed_tensors.PackedMatrix = replace(whole, outputs=self.shape[1])
        return found

    @cached_property
    def _matrices(self) -> Sequence[PackedMatrix]:
        return self.whole.split(self.count)


def stack_of(parts: Sequence[PackedMatrix], count: int) -> PackedStack | None:
    """Return ``count`` matrices of as many parts each, one after another, or None if they are of several formats or no whole tiles."""
    whole = joined_matrices(_with_own_factors(_with_scales_of_one_dtype(parts)))
    return None if whole is None else PackedStack(whole, count)


def _with_scales_of_one_dtype(parts: Sequence[PackedMatrix]) -> Sequence[PackedMatrix]:
    """Return the matrices, with the scales of those in groups converted to float32 if their dtypes differ."""
    if len({part.scales.dtype for part in parts if isinstance(part, PackedWeight)}) < 2:
        return parts
    return [replace(part, scales=part.scales.float()) if isinstance(part, PackedWeight) else part for part in parts]


def _with_own_factors(parts: Sequence[PackedMatrix]) -> Sequence[PackedMatrix]:
    """Return matrices of which those in NVFP4 keep their factors when they are joined."""
    return [part.with_factor_of_each_tile() if isinstance(part, PackedWeight) and part.factor is not None else part for part in parts]


#: Matrices ``[count, outputs, inputs]``.
MatrixStack = torch.Tensor | PackedStack
