"""Weights in the layout of the packed kernels: quantized ones, of checkpoint formats that these kernels support, and rounded ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trt_kvcache._util.in_threads import row_slices
from trt_kvcache.checkpoint.quantized.quantization import SCHEMES
from trt_kvcache.checkpoint.quantized.weight import QuantizedWeight
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.kernels.linear_kernels import INPUT_GRANULE
from trt_kvcache.kernels.linear_tiles import NVFP4_SCALES
from trt_kvcache.kernels.nvfp4_scales import NVFP4_GROUP, NVFP4_LIMIT, nvfp4_factor
from trt_kvcache.kernels.packed_layout import (
    FRAGMENT_INPUTS,
    FRAGMENT_NBYTES,
    FRAGMENT_OUTPUTS,
    MIDDLES,
    NVFP4_GROUPS,
    PACKED_KINDS,
    VALUE_RANGES,
    count_groups,
    count_tiles,
    shift_of_groups,
)
from trt_kvcache.kernels.source_variants import SCALE_DTYPES
from trt_kvcache.memory.base import Memory
from trt_kvcache.torch_engine.packed_places import by_tile, pack_rows, pack_values
from trt_kvcache.torch_engine.packed_weight import PackedWeight, times_factor
from trt_kvcache.torch_engine.rounding import round_rows
from trt_kvcache.torch_engine.upload import Upload
from trt_kvcache.torch_engine.uploaded_rows import ON_DEVICE, UploadedRows, joined_rows

_DTYPES = {"int4": torch.uint8, "int8": torch.int8}

#: Bits of a NaN of e4m3 without its sign. The kernels for GPUs before sm_89 take it for a number.
_NAN = 0x7F


def packed_weight(parts: Sequence[QuantizedWeight], dtype: str, upload: Upload, memory: Memory) -> PackedWeight | None:
    """Return some rows of one stored matrix on a device, or None if the kernels cannot compute its values, or ``dtype`` not hold them.

    Its weights in ``dtype`` are those of :meth:`QuantizedWeight.dequantized`, bit by bit. It is copied as it is stored, and unpacked there.
    """
    first, inputs = parts[0], parts[0].shape[1]
    kind_of_values, factor = first.quantized_values.kind, None
    if kind_of_values == "e2m1" and first.scales.stored.dtype == numpy_dtype(NVFP4_SCALES):
        factor = nvfp4_factor(first.scales.factor, first.scales.divisor, dtype)
        if factor is None or first.scales.block != (1, NVFP4_GROUP):
            return None
        parts = [replace(part, scales=replace(part.scales, factor=1.0, divisor=1.0)) for part in parts]
        first = parts[0]
    if kind_of_values not in PACKED_KINDS or first.input_factor is not None or inputs % INPUT_GRANULE:
        return None
    shift = shift_of_groups(first.scales.block[1], first.scales.stored.shape[1]) if factor is None else NVFP4_GROUPS
    if shift is None or not _has_whole_groups(first):
        return None
    order = None if first.permutation is None else upload(first.permutation)
    (kind, added), outputs = PACKED_KINDS[kind_of_values], sum(part.shape[0] for part in parts)
    whole: UploadedRows | None = None
    if len(parts) > 1 or first.row_order is not None:  # heads, whose rows may end within a tile, or rows that are stored apart
        whole = joined_rows([UploadedRows.of(part, upload) for part in parts])
    of_groups: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    are_nan: list[torch.Tensor] = []

    def read(rows: slice) -> torch.Tensor:
        some = UploadedRows.of(first.rows(rows), upload) if whole is None else whole[rows]
        of_groups.append((some.scales, some.zero_points))
        if kind == "e4m3":
            are_nan.append((some.values & _NAN == _NAN).any())
        columns = some.values if order is None else some.values[:, order]
        return columns + added if added else columns

    values = _packed_values(outputs, inputs, kind, read, upload.device)
    scales = torch.cat([scales for scales, _ in of_groups])
    zero_points = _zero_points([found for _, found in of_groups if found is not None], scales, kind, added)
    if factor is None:
        stored_scales = _stored_scales(scales, kind, _scales_dtypes(first, dtype))
    else:
        stored_scales, scales = scales.to(torch.float8_e4m3fn), times_factor(scales, factor)
        if not float(scales.abs().amax()) < NVFP4_LIMIT:
            return None
    if stored_scales is None or not _can_hold(dtype, kind, scales, zero_points) or any(are_nan):
        return None
    return PackedWeight(
        dtype=getattr(torch, dtype),
        memory=memory,
        kind=kind,
        outputs=outputs,
        inputs=inputs,
        group_shift=shift,
        values=values,
        **_of_groups(stored_scales, zero_points, count_groups(inputs, shift), are_shared=kind == "e4m3"),
        order=None if order is None else order.int(),
        factor=factor,
    )


def rounded_weight(
    values: npt.NDArray[Any], scheme: str, scales_dtype: str, dtype: str, upload: Upload, memory: Memory
) -> PackedWeight | None:
    """Return a matrix ``[out, in]``, rounded on the device; None if :func:`packed_weight` must decide about it.

    Its weights are those of ``rounded_to_nearest``, bit by bit.
    """
    (outputs, inputs), (bits, group) = values.shape, SCHEMES[scheme]
    kind, added = PACKED_KINDS[f"int{bits}"]
    groups = -(-inputs // (group or inputs))
    shift = shift_of_groups(group or inputs, groups)
    if shift is None or inputs % INPUT_GRANULE:
        return None
    scales = torch.empty((outputs, groups), dtype=getattr(torch, scales_dtype), device=upload.device)
    has_extremes = False

    def read(rows: slice) -> torch.Tensor:
        nonlocal has_extremes
        quantized, scales[rows], is_extreme = round_rows(upload(values[rows]), scheme, scales.dtype)
        has_extremes |= is_extreme
        return quantized + added if added else quantized

    packed = _packed_values(outputs, inputs, kind, read, upload.device)
    exact = scales.float()
    stored_scales = _stored_scales(exact, kind, SCALE_DTYPES[dtype])
    if has_extremes or stored_scales is None or not _can_hold(dtype, kind, exact, None):
        return None
    return PackedWeight(
        dtype=getattr(torch, dtype),
        memory=memory,
        kind=kind,
        outputs=outputs,
        inputs=inputs,
        group_shift=shift,
        values=packed,
        **_of_groups(stored_scales, None, count_groups(inputs, shift), are_shared=False),
    )


def _has_whole_groups(weight: QuantizedWeight) -> bool:
    """Return True if groups have their usual sizes once they are contiguous."""
    if weight.group_index is None or weight.permutation is None:
        return True
    usual = np.arange(weight.shape[1]) // weight.scales.block[1]
    return bool(np.array_equal(weight.group_index[weight.permutation], usual))


def _zero_points(stored: Sequence[torch.Tensor], scales: torch.Tensor, kind: str, added: int) -> torch.Tensor | None:
    """Return the zero point of each group of each row, as the kernels take it; None if all are the middle."""
    if not stored and added % 256 == MIDDLES[kind]:
        return None
    zero_points = torch.cat(list(stored)) if stored else torch.zeros(scales.shape, dtype=torch.uint8, device=scales.device)
    zero_points = (zero_points + added).view(_DTYPES[kind])
    return zero_points if bool((zero_points != MIDDLES[kind]).any()) else None


def _can_hold(dtype: str, kind: str, scales: torch.Tensor, zero_points: torch.Tensor | None) -> bool:
    """Return True if ``dtype`` can hold all values with these scales and zero points."""
    low, high = VALUE_RANGES[kind]
    if zero_points is None:
        largest = max(MIDDLES[kind] - low, high - MIDDLES[kind]) * scales.abs().amax()
    else:
        middles = zero_points.float()
        largest = torch.maximum((low - middles).abs(), (high - middles).abs()) * scales.abs()
    return bool(largest.to(getattr(torch, dtype)).isfinite().all())


def _of_groups(scales: torch.Tensor, zero_points: torch.Tensor | None, groups: int, *, are_shared: bool) -> dict[str, torch.Tensor | None]:
    """Return scales, and zero points if there are any, as the kernels take them; ``groups``: with those of padding."""
    of_rows = pack_rows(scales, groups)
    return {
        "scales": by_tile(of_rows, len(scales)) if are_shared else of_rows,
        "zero_points": None if zero_points is None else pack_rows(zero_points, groups),
    }


def _scales_dtypes(weight: QuantizedWeight, dtype: str) -> Sequence[str]:
    """Return the dtypes of scales to try: the one of 16 bits in the file alone, if the kernels know it, as it holds all of them.

    Others of FP8 are not tried: single scales fit into 16 bits by chance, and q, k and v with scales of several dtypes cannot be joined.
    """
    scales, dtypes = weight.scales, SCALE_DTYPES[dtype]
    is_exact = scales.factor == scales.divisor == 1
    of_file = [name for name in dtypes[:-1] if is_exact and numpy_dtype(name) == scales.stored.dtype]
    return of_file or ([] if weight.quantized_values.kind == "e4m3" else dtypes)


def _stored_scales(scales: torch.Tensor, kind: str, dtypes: Sequence[str]) -> torch.Tensor | None:
    """Return the scales in the first of these dtypes that holds all of them exactly, or else in float32; None for others of e2m1."""
    if kind == "e2m1":
        exponents = scales.to(torch.float8_e8m0fnu)
        return exponents.view(torch.uint8) if bool((exponents.float() == scales).all()) else None
    for name in dtypes:
        stored = scales.to(getattr(torch, name))
        if len(dtypes) == 1 or bool((stored.float() == scales).all()):
            return stored
    return scales


def _packed_values(outputs: int, inputs: int, kind: str, read: Callable[[slice], torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the packed values of the rows that ``read`` returns, a part at a time."""
    packed = torch.empty((count_tiles(outputs), -(-inputs // FRAGMENT_INPUTS) * FRAGMENT_NBYTES[kind]), dtype=torch.uint8, device=device)
    for rows in row_slices(outputs, inputs, ON_DEVICE, multiple=FRAGMENT_OUTPUTS):
        packed[rows.start // FRAGMENT_OUTPUTS : count_tiles(rows.stop)] = pack_values(read(rows), kind)
    return packed
