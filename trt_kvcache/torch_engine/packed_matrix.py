"""``PackedMatrix``: a matrix of fewer than 16 bits a weight on a device; ``PackedParts``: several, with concatenated outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from trt_kvcache.kernels import packed_tensors
from trt_kvcache.kernels.packed_pair_kernels import pair_is_supported
from trt_kvcache.memory.base import Memory


class PackedMatrix(ABC):
    """A matrix ``[outputs, inputs]`` that the kernels for packed weights take.

    ``order``: the input of each column that they read (act-order), int32 ``[inputs]`` on the device; None for inputs in order.
    """

    dtype: torch.dtype
    memory: Memory
    outputs: int
    inputs: int
    order: torch.Tensor | None = None

    @property
    @abstractmethod
    def tensors(self) -> packed_tensors.PackedMatrix:
        """The matrix as the kernels take it."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Size on the device."""

    @abstractmethod
    def split(self, count: int) -> Sequence[PackedMatrix]:
        """Return ``count`` matrices of equal numbers of outputs, whole tiles, over the same memory."""

    @abstractmethod
    def dequantized(self) -> torch.Tensor:
        """Return the matrix by operations of torch, bit for bit as the kernels compute it, with its inputs in order."""


def have_one_order(matrices: Sequence[PackedMatrix]) -> bool:
    """Return True if matrices take their inputs in the same order."""
    first = matrices[0].order
    orders = [matrix.order for matrix in matrices[1:]]
    return all(order is first or (order is not None and first is not None and torch.equal(order, first)) for order in orders)


@dataclass(frozen=True)
class PackedParts:
    """Matrices of the same input with concatenated outputs, in different formats: a launch for each, or for two neighbours."""

    parts: tuple[PackedMatrix, ...]

    @cached_property
    def launches(self) -> tuple[tuple[PackedMatrix, ...], ...]:
        """The parts of each launch for few rows, in order: two if there are kernels for their formats."""
        found: list[tuple[PackedMatrix, ...]] = []
        for part in self.parts:
            if found and len(found[-1]) == 1 and _are_pair(found[-1][0], part):
                found[-1] = (*found[-1], part)
            else:
                found.append((part,))
        return tuple(found)

    @property
    def outputs(self) -> int:
        """Outputs of all."""
        return sum(part.outputs for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Size on the device."""
        return sum(part.nbytes for part in self.parts)

    def dequantized(self) -> torch.Tensor:
        """See :meth:`PackedMatrix.dequantized`."""
        return torch.cat([part.dequantized() for part in self.parts])


def _are_pair(first: PackedMatrix, second: PackedMatrix) -> bool:
    return first.order is None and second.order is None and pair_is_supported(first.tensors, second.tensors)
