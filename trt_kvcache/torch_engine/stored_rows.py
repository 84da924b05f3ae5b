"""``StoredRows``: a table whose rows stay in the blocks of a GGUF file, and are dequantized as they are looked up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch

from trt_kvcache._util.in_threads import row_slices
from trt_kvcache.checkpoint.quantized.gguf import BLOCK, BlockValues, block_scale_bytes, block_values
from trt_kvcache.checkpoint.quantized.super_blocks import SuperBlocks
from trt_kvcache.checkpoint.quantized.table_blocks import TableBlocks
from trt_kvcache.memory.base import Memory
from trt_kvcache.torch_engine.offset_block_rows import offset_block_values
from trt_kvcache.torch_engine.row_lookup import HostRows, LookUp, Table, look_up
from trt_kvcache.torch_engine.super_block_rows import SuperBlockRows
from trt_kvcache.torch_engine.upload import Upload
from trt_kvcache.torch_engine.uploaded_rows import ON_DEVICE

#: Function of the name of a table: its rows as they are stored, or in host memory; None for a table that is read whole.
LoadRows: TypeAlias = "Callable[[str], StoredRows | HostRows | None]"

#: Function of blocks uint8 ``[n, blocks, bytes]``: their values ``[n, columns]``.
_Unpack: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class StoredRows:
    """Blocks uint8 ``[rows, blocks, bytes]``, and the function that dequantizes some rows of them on a device."""

    blocks: Table
    unpack: _Unpack

    @classmethod
    def of(cls, stored: TableBlocks, dtype: torch.dtype, upload: Upload, *, host: Memory | None = None) -> StoredRows | None:
        """Return a table on the device of ``upload``, or in pinned memory of ``host``; None if ``dtype`` cannot hold its values."""
        if isinstance(stored, BlockValues):
            blocks, unpack = stored.bytes_of(slice(None)), partial(_values, kind=stored.kind, dtype=dtype)
        elif isinstance(stored, SuperBlocks):
            blocks, unpack = stored.blocks(), partial(_super_block_values, kind=stored.kind, dtype=dtype)
        else:
            blocks, unpack = stored.blocks(slice(None)), partial(_offset_values, kind=stored.kind, dtype=dtype)
        parts = row_slices(*stored.shape, ON_DEVICE)
        if host is not None:
            are_finite = [unpack(upload(blocks[part])).isfinite().all() for part in parts]
            return cls(HostRows.of(blocks, "uint8", host), unpack) if bool(torch.stack(are_finite).all()) else None
        table = upload(blocks)
        are_finite = [unpack(table[part]).isfinite().all() for part in parts]
        return cls(table, unpack) if bool(torch.stack(are_finite).all()) else None

    def __call__(self, ids: torch.Tensor, rows_of: LookUp = look_up) -> torch.Tensor:
        """Return the rows ``[A, s, columns]`` of ``ids`` ``[A, s]``, by operations of fixed shapes."""
        return self.unpack(rows_of(self.blocks, ids).flatten(0, 1)).unflatten(0, ids.shape)


def _values(blocks: torch.Tensor, *, kind: str, dtype: torch.dtype) -> torch.Tensor:
    values = block_values(blocks, kind, blocks.new_empty).view(torch.int8).float()
    scales = block_scale_bytes(blocks, kind).contiguous().view(torch.float16)[..., 0].float()
    return (values * scales.repeat_interleave(BLOCK, dim=1)).to(dtype)


def _super_block_values(blocks: torch.Tensor, *, kind: str, dtype: torch.dtype) -> torch.Tensor:
    return SuperBlockRows.of(blocks, kind).dequantized(kind.lower(), dtype)


def _offset_values(blocks: torch.Tensor, *, kind: str, dtype: torch.dtype) -> torch.Tensor:
    return offset_block_values(blocks, kind).to(dtype)
