"""``PackedWeight``: a matrix in 4 or 8 bits on a device, in the layout of the packed kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from trt_kvcache._util.in_threads import row_slices
from trt_kvcache.checkpoint.quantized.quantized_values import E2M1_VALUES
from trt_kvcache.kernels.nvfp4_scales import kernel_factors_of, nvfp4_kernel_factor
from trt_kvcache.kernels.packed_layout import FRAGMENT_INPUTS, FRAGMENT_NBYTES, FRAGMENT_OUTPUTS, MIDDLES, groups_of
from trt_kvcache.kernels.packed_tensors import PackedTensors
from trt_kvcache.memory.base import Memory
from trt_kvcache.torch_engine.device_view import device_view
from trt_kvcache.torch_engine.packed_matrix import PackedMatrix, have_one_order
from trt_kvcache.torch_engine.packed_places import by_row, pack_rows, pack_values, unpack_rows, unpack_values
from trt_kvcache.torch_engine.uploaded_rows import ON_DEVICE


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
    order: torch.Tensor | None = None
    factor: tuple[float, float] | None = None
    factors: torch.Tensor | None = None
    kernel_factors: torch.Tensor | None = None

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
            factor=self.factor,
            kernel_factor=None if self.factor is None else nvfp4_kernel_factor(self.factor, str(self.dtype).removeprefix("torch.")),
            factors=None if self.factors is None else device_view(self.factors, self.memory),
            kernel_factors=None if self.kernel_factors is None else device_view(self.kernel_factors, self.memory),
        )

    @property
    def nbytes(self) -> int:
        """See :class:`PackedMatrix`."""
        tensors = (self.values, self.scales, self.zero_points, self.order, self.factors, self.kernel_factors)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def split(self, count: int) -> list[PackedWeight]:
        """See :class:`PackedMatrix`."""
        names = ("values", "scales", "zero_points", "factors", "kernel_factors")
        chunks = {name: tensor.chunk(count) for name in names if (tensor := getattr(self, name)) is not None}
        outputs = self.outputs // count
        return [replace(self, outputs=outputs, **{name: parts[index] for name, parts in chunks.items()}) for index in range(count)]

    def dequantized(self) -> torch.Tensor:
        """See :class:`PackedMatrix`."""
        columns = self._columns()
        return columns if self.order is None else columns[:, self.order.argsort()]

    def with_outputs(self, order: torch.Tensor) -> PackedWeight:
        """Return the matrix with its outputs in another order."""
        values = [pack_values(unpack_values(some, self.kind, self.outputs, count)[order], self.kind) for some, count in self._parts()]

        def ordered(of_tiles: torch.Tensor) -> torch.Tensor:
            return pack_rows(unpack_rows(of_tiles, self.outputs)[order], of_tiles.shape[1])

        zero_points = None if self.zero_points is None else ordered(self.zero_points)
        return replace(self, values=torch.cat(values, dim=1), scales=ordered(self.scales), zero_points=zero_points)

    def with_factor_of_each_tile(self) -> PackedWeight:
        """Return a matrix in NVFP4 as one of experts, whose factors need not be equal."""
        both = [self.factor], kernel_factors_of([self.factor], str(self.dtype).removeprefix("torch."))
        factors, of_kernels = (self.scales.new_tensor(one, dtype=torch.float32).repeat(len(self.values), 1) for one in both)
        return replace(self, factor=None, factors=factors, kernel_factors=of_kernels)

    def _exact_scales(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the scales ``[outputs, groups]`` of FP4 in float32."""
        if self.factor is not None:
            return times_factor(stored, self.factor)
        if self.factors is None:
            return stored.view(torch.float8_e8m0fnu).float()
        high, low = self.factors.repeat_interleave(FRAGMENT_OUTPUTS, dim=0)[: self.outputs, :, None].unbind(1)
        return times_factor(stored, (high, low))

    def _parts(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield the packed values of some inputs of all outputs, and the number of these inputs."""
        for some in row_slices(self.inputs, self.outputs, ON_DEVICE, multiple=FRAGMENT_INPUTS):
            first, last = some.start // FRAGMENT_INPUTS, -(-some.stop // FRAGMENT_INPUTS)
            nbytes = FRAGMENT_NBYTES[self.kind]
            yield self.values[:, first * nbytes : last * nbytes].contiguous(), some.stop - some.start

    def _columns(self) -> torch.Tensor:
        """Return the matrix, with its inputs in the order of the kernels."""
        values = unpack_values(self.values, self.kind, self.outputs, self.inputs)
        group = torch.from_numpy(groups_of(self.inputs, self.group_shift)).to(values.device)
        scales = unpack_rows(self.scales, self.outputs)
        if self.kind == "e2m1":
            table = torch.tensor(E2M1_VALUES.tolist(), device=values.device)
            exact = self._exact_scales(scales)
            return (table[values.int()] * exact[:, group]).to(self.dtype)
        zero_points = MIDDLES[self.kind] if self.zero_points is None else unpack_rows(self.zero_points, self.outputs).float()[:, group]
        return ((values.float() - zero_points) * scales.float()[:, group]).to(self.dtype)


def joined(parts: Sequence[PackedWeight]) -> PackedWeight | None:
    """Return matrices of the same input with concatenated outputs; None if one launch cannot take them, as their formats differ."""
    first = parts[0]
    if len(parts) == 1:
        return first
    formats = {(part.kind, part.inputs, part.group_shift, part.scales.dtype, part.factor) for part in parts}
    if len(formats) > 1 or any(part.outputs % FRAGMENT_OUTPUTS for part in parts) or not have_one_order(parts):
        return None
    scales = [part.scales for part in parts]
    if len({one.shape[2] for one in scales}) > 1:
        scales = [by_row(one) for one in scales]
    has_zero_points = any(part.zero_points is not None for part in parts)
    return PackedWeight(
        dtype=first.dtype,
        memory=first.memory,
        kind=first.kind,
        outputs=sum(part.outputs for part in parts),
        inputs=first.inputs,
        group_shift=first.group_shift,
        values=torch.cat([part.values for part in parts]),
        scales=torch.cat(scales),
        zero_points=torch.cat([_zero_points(part) for part in parts]) if has_zero_points else None,
        order=first.order,
        factor=first.factor,
        factors=_of_all([part.factors for part in parts]),
        kernel_factors=_of_all([part.kernel_factors for part in parts]),
    )


def _of_all(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    found = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(found) if found else None


def times_factor(stored: torch.Tensor, factor: tuple[Any, Any]) -> torch.Tensor:
    """Return scales of NVFP4 times their factor (or times one for each row), as ``nvfp4_scales`` computes them."""
    high, low = factor
    return (stored.double() * high + (stored.float() * low).double()).float()


def _zero_points(weight: PackedWeight) -> torch.Tensor:
    """Return zero points, those of a matrix without any too."""
    if weight.zero_points is not None:
        return weight.zero_points
    dtype = torch.uint8 if weight.kind == "int4" else torch.int8
    return torch.full(by_row(weight.scales).shape, MIDDLES[weight.kind], dtype=dtype, device=weight.scales.device)
