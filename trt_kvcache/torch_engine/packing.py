"""Weights in the layout of the packed kernels: quantized ones, of checkpoint formats that these kernels support, and rounded ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

from trt_kvcache._util.in_threads import for_each, row_slices
from trt_kvcache.checkpoint.quantized.quantization import SCHEMES
from trt_kvcache.checkpoint.quantized.weight import QuantizedWeight
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.kernels.linear_kernels import INPUT_GRANULE
from trt_kvcache.kernels.packed_layout import (
    FRAGMENT_INPUTS,
    FRAGMENT_NBYTES,
    FRAGMENT_OUTPUTS,
    HALF_INPUTS,
    MIDDLES,
    ONE_GROUP,
    count_groups,
    count_tiles,
)
from trt_kvcache.kernels.source_variants import SCALE_DTYPES
from trt_kvcache.memory.base import Memory
from trt_kvcache.torch_engine.packed_places import pack_rows, pack_values
from trt_kvcache.torch_engine.packed_weight import PackedWeight
from trt_kvcache.torch_engine.rounding import round_rows
from trt_kvcache.torch_engine.upload import Upload

#: By kind of quantized value: packed kind, and what is added to values and zero points.
_KINDS = {"int4": ("int4", 8), "uint4": ("int4", 0), "int8": ("int8", 0), "uint8": ("int8", -128), "e2m1": ("e2m1", 0)}

_RANGES = {"int4": (0, 15), "int8": (-128, 127), "e2m1": (-6, 6)}
_DTYPES: dict[str, Any] = {"int4": np.uint8, "int8": np.int8, "e2m1": np.uint8}

#: Values on the device at a time that are not packed yet, and those that a thread unpacks at a time.
_ON_DEVICE, _OF_A_THREAD = 1 << 24, 1 << 20

Float32 = npt.NDArray[np.float32]


def packed_weight(parts: Sequence[QuantizedWeight], dtype: str, upload: Upload, memory: Memory) -> PackedWeight | None:
    """Return some rows of one stored matrix on a device, or None if the kernels cannot compute its values, or ``dtype`` not hold them.

    Its weights in ``dtype`` are those of :meth:`QuantizedWeight.dequantized`, bit by bit.
    """
    first, inputs = parts[0], parts[0].shape[1]
    kind_of_values = first.quantized_values.kind
    if kind_of_values not in _KINDS or first.group_index is not None or first.input_factor is not None or inputs % INPUT_GRANULE:
        return None
    kind, added = _KINDS[kind_of_values]
    scales = _joined([part.scales_of_rows() for part in parts])
    shift = _group_shift(first.scales.block[1], scales.shape[1])
    zero_points = _zero_points(parts, scales.shape, added, MIDDLES[kind])
    stored_scales = _stored_scales(scales, kind, _scales_dtypes(first, dtype))
    if shift is None or stored_scales is None or not _can_hold(dtype, kind, scales, zero_points):
        return None
    whole: npt.NDArray[Any] | None = None
    if len(parts) > 1 or first.row_order is not None:  # heads, whose rows may end within a tile, or rows that are stored apart
        whole = np.concatenate([part.unpacked() for part in parts])

    def read(rows: slice) -> torch.Tensor:
        values = np.empty((rows.stop - rows.start, inputs), _DTYPES[kind])

        def unpack(some: slice) -> None:
            of_matrix = slice(rows.start + some.start, rows.start + some.stop)
            values[some] = _shifted(first.rows(of_matrix).unpacked() if whole is None else whole[of_matrix], kind, added)

        for_each(unpack, row_slices(len(values), inputs, _OF_A_THREAD))
        return upload(values)

    return PackedWeight(
        dtype=getattr(torch, dtype),
        memory=memory,
        kind=kind,
        outputs=len(scales),
        inputs=inputs,
        group_shift=shift,
        values=_packed_values(len(scales), inputs, kind, read, upload.device),
        **_of_groups(stored_scales, zero_points, kind, count_groups(inputs, shift), upload),
    )


def rounded_weight(
    values: npt.NDArray[Any], scheme: str, scales_dtype: str, dtype: str, upload: Upload, memory: Memory
) -> PackedWeight | None:
    """Return a matrix ``[out, in]``, rounded on the device; None if :func:`packed_weight` must decide about it.

    Its weights are those of ``rounded_to_nearest``, bit by bit.
    """
    (outputs, inputs), (bits, group) = values.shape, SCHEMES[scheme]
    kind, added = _KINDS[f"int{bits}"]
    groups = -(-inputs // (group or inputs))
    shift = _group_shift(group or inputs, groups)
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
    of_host = scales.float().cpu().numpy()
    stored_scales = _stored_scales(of_host, kind, SCALE_DTYPES[dtype])
    if has_extremes or stored_scales is None or not _can_hold(dtype, kind, of_host, None):
        return None
    return PackedWeight(
        dtype=getattr(torch, dtype),
        memory=memory,
        kind=kind,
        outputs=outputs,
        inputs=inputs,
        group_shift=shift,
        values=packed,
        **_of_groups(stored_scales, None, kind, count_groups(inputs, shift), upload),
    )


def _group_shift(width: int, groups: int) -> int | None:
    """Return the group shift of groups of ``width`` inputs, or None if the kernels do not know it."""
    if groups == 1:
        return ONE_GROUP
    halves, rest = divmod(width, HALF_INPUTS)
    return None if rest or halves & (halves - 1) else halves.bit_length() - 1


def _zero_points(parts: Sequence[QuantizedWeight], shape: tuple[int, ...], added: int, middle: int) -> Float32 | None:
    """Return the zero point of each group of each row; None if all are the middle."""
    found = [part.zero_points_of_rows() for part in parts]
    stored = [one for one in found if one is not None]
    if not stored and added == middle:
        return None
    zero_points: Float32 = _joined(stored) if stored else np.zeros(shape, np.float32)
    zero_points += np.float32(added)
    return zero_points if (zero_points != middle).any() else None


def _joined(of_parts: Sequence[Float32]) -> Float32:
    return of_parts[0] if len(of_parts) == 1 else np.concatenate(of_parts)


def _can_hold(dtype: str, kind: str, scales: Float32, zero_points: Float32 | None) -> bool:
    """Return True if ``dtype`` can hold all values with these scales and zero points."""
    low, high = _RANGES[kind]
    with np.errstate(over="ignore"):
        if zero_points is None:
            largest = np.asarray(
                max(MIDDLES[kind] - low, high - MIDDLES[kind]) * max(scales.max(initial=0), -scales.min(initial=0)), np.float32
            )
        else:
            largest = np.maximum(np.abs(low - zero_points), np.abs(high - zero_points)) * np.abs(scales)
        return bool(np.isfinite(largest.astype(numpy_dtype(dtype)).astype(np.float32)).all())


def _of_groups(
    scales: npt.NDArray[Any], zero_points: Float32 | None, kind: str, groups: int, upload: Upload
) -> dict[str, torch.Tensor | None]:
    """Return scales, and zero points if there are any, as the kernels take them; ``groups``: with those of padding."""
    return {
        "scales": pack_rows(upload(scales), groups),
        "zero_points": None if zero_points is None else pack_rows(upload(zero_points.astype(_DTYPES[kind])), groups),
    }


def _scales_dtypes(weight: QuantizedWeight, dtype: str) -> Sequence[str]:
    """Return the dtypes of scales to try: the one of 16 bits in the file alone, if the kernels know it, as it holds all of them."""
    scales, dtypes = weight.scales, SCALE_DTYPES[dtype]
    if scales.factor != 1 or scales.divisor != 1:
        return dtypes
    return [name for name in dtypes[:-1] if numpy_dtype(name) == scales.stored.dtype] or dtypes


def _stored_scales(scales: Float32, kind: str, dtypes: Sequence[str]) -> npt.NDArray[Any] | None:
    """Return the scales in the first of these dtypes that holds all of them exactly, or else in float32; None for others of e2m1."""
    if kind == "e2m1":
        exponents = scales.astype(ml_dtypes.float8_e8m0fnu)
        return exponents.view(np.uint8) if np.array_equal(exponents.astype(np.float32), scales) else None
    for name in dtypes:
        with np.errstate(over="ignore"):
            stored = scales.astype(numpy_dtype(name))
        if len(dtypes) == 1 or np.array_equal(stored.astype(np.float32), scales):
            return stored
    return scales


def _packed_values(outputs: int, inputs: int, kind: str, read: Callable[[slice], torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the packed values of the rows that ``read`` returns, a part at a time."""
    packed = torch.empty((count_tiles(outputs), -(-inputs // FRAGMENT_INPUTS) * FRAGMENT_NBYTES[kind]), dtype=torch.uint8, device=device)
    for rows in row_slices(outputs, inputs, _ON_DEVICE, multiple=FRAGMENT_OUTPUTS):
        packed[rows.start // FRAGMENT_OUTPUTS : count_tiles(rows.stop)] = pack_values(read(rows), kind)
    return packed


def _shifted(values: npt.NDArray[Any], kind: str, added: int) -> npt.NDArray[Any]:
    """Return stored values as the kernels take them: modulo 256, which the ranges of both kinds exclude."""
    found: npt.NDArray[Any] = (values.view(np.uint8) + np.uint8(added % 256)).view(_DTYPES[kind])
    return found
