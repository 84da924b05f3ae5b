"""``UploadedRows``: rows of a quantized weight, copied to a device as they are stored, and unpacked there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy.typing as npt
import torch

from trt_kvcache._util.in_threads import row_slices
from trt_kvcache.checkpoint.quantized.gguf import BlockValues
from trt_kvcache.checkpoint.quantized.quantized_values import E2M1_VALUES
from trt_kvcache.checkpoint.quantized.weight import QuantizedWeight
from trt_kvcache.torch_engine.upload import Upload

#: Values on the device at a time that are not in their last form yet.
ON_DEVICE = 1 << 24

_SIGNED = ("int4", "int8")


@dataclass(frozen=True, kw_only=True)
class UploadedRows:
    """Rows of a matrix, as in ``QuantizedWeight``."""

    values: torch.Tensor  # [rows, in], uint8: the quantized values modulo 256
    scales: torch.Tensor  # [rows, blocks of columns], float32
    zero_points: torch.Tensor | None  # [rows, blocks of columns], as the values

    @classmethod
    def of(cls, weight: QuantizedWeight, upload: Upload) -> UploadedRows:
        """Return the rows of a weight on the device of ``upload``, in their order."""
        values, rows = weight.quantized_values, weight.stored_rows
        stored = upload(values.bytes_of(rows))
        found = cls(
            values=values.separated(stored, rows, upload.empty_bytes),
            scales=_by_row(weight, _scales(weight, stored, upload)),
            zero_points=_zero_points(weight, upload),
        )
        return found if weight.row_order is None else found[upload(weight.row_order)]

    def __getitem__(self, chosen: slice | torch.Tensor) -> UploadedRows:
        """Return some rows; ``chosen``: a slice, or indices."""
        zero_points = None if self.zero_points is None else self.zero_points[chosen]
        return UploadedRows(values=self.values[chosen], scales=self.scales[chosen], zero_points=zero_points)


def joined_rows(parts: Sequence[UploadedRows]) -> UploadedRows:
    """Return rows of one matrix after each other."""
    if len(parts) == 1:
        return parts[0]
    columns = {field.name: [getattr(part, field.name) for part in parts] for field in fields(UploadedRows)}
    return UploadedRows(**{name: None if found[0] is None else torch.cat(found) for name, found in columns.items()})


def _scales(weight: QuantizedWeight, stored: torch.Tensor, upload: Upload) -> torch.Tensor:
    """Return the scales of blocks: those of a GGUF file lie in the stored bytes of its values."""
    scales, values = weight.scales, weight.quantized_values
    blocks = scales.blocks(weight.stored_rows)
    if isinstance(values, BlockValues):
        found = values.scale_bytes(stored).contiguous().view(getattr(torch, scales.stored.dtype.name))[..., 0].float()
    else:
        found = _uploaded(scales.stored[blocks], upload).float()
    if scales.divisor != 1:
        found = found / torch.full_like(found, scales.divisor)  # a number would be a multiplication by its inverse on a GPU
    return found * scales.factor if scales.factor != 1 else found


def _zero_points(weight: QuantizedWeight, upload: Upload) -> torch.Tensor | None:
    zero_points, blocks = weight.zero_points, weight.scales.blocks(weight.stored_rows)
    if zero_points is None:
        return None
    return _by_row(weight, zero_points.separated(upload(zero_points.bytes_of(blocks)), blocks, upload.empty_bytes))


def _uploaded(values: npt.NDArray[Any], upload: Upload) -> torch.Tensor:
    """Return an array on the device, in the memory order of the host: it is transposed there."""
    return upload(values.T).T if abs(values.strides[0]) < abs(values.strides[1]) else upload(values)


def _by_row(weight: QuantizedWeight, of_blocks: torch.Tensor) -> torch.Tensor:
    """Return the values of the blocks for each row: see ``QuantizedWeight``."""
    height, rows = weight.scales.block[0], weight.stored_rows
    if height == 1:
        return of_blocks
    first = rows.start % height
    return of_blocks.repeat_interleave(height, dim=0)[first : first + rows.stop - rows.start]


def _dequantized_rows(rows: UploadedRows, weight: QuantizedWeight, dtype: torch.dtype, upload: Upload) -> torch.Tensor:
    values = _exact(rows.values, weight.quantized_values.kind)
    order = None if weight.group_index is None else upload(weight.group_index).long()
    if rows.zero_points is not None:
        values -= _by_column(weight, _exact(rows.zero_points, weight.quantized_values.kind), order)
    values *= _by_column(weight, rows.scales, order)
    if weight.input_factor is not None:
        values *= upload(weight.input_factor)
    return values.to(dtype)


def _exact(values: torch.Tensor, kind: str) -> torch.Tensor:
    """Return quantized values in float32, in new memory."""
    if kind == "e2m1":
        return torch.tensor(E2M1_VALUES.tolist(), device=values.device)[values.int()]
    if kind == "e4m3":
        return values.view(torch.float8_e4m3fn).float()
    return (values.view(torch.int8) if kind in _SIGNED else values).float()


def _by_column(weight: QuantizedWeight, of_blocks: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """Return the values of the blocks of columns for each column."""
    if order is not None:
        return of_blocks[:, order]
    return of_blocks.repeat_interleave(weight.scales.block[1], dim=1)[:, : weight.shape[1]]


def dequantized(weight: QuantizedWeight, dtype: torch.dtype, upload: Upload) -> torch.Tensor | None:
    """Return a whole weight, some rows at a time: the values of :meth:`QuantizedWeight.dequantized`. None if ``dtype`` cannot hold them."""
    values, parts = torch.empty(weight.shape, dtype=dtype, device=upload.device), row_slices(*weight.shape, ON_DEVICE)
    for rows in parts:
        some = weight.rows(rows)
        values[rows] = _dequantized_rows(UploadedRows.of(some, upload), some, dtype, upload)
    return values if all_finite(values, parts) else None


def all_finite(values: torch.Tensor, parts: Sequence[slice]) -> bool:
    """Return True if all values are finite. They are read in parts, as torch makes copies of what it reads."""
    return bool(torch.stack([values[part].isfinite().all() for part in parts]).all())
