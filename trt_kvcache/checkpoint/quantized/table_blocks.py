"""Tables that a GGUF file stores in blocks, of which engines look up single rows."""

from __future__ import annotations

from typing import TypeAlias

from trt_kvcache.checkpoint.checkpoint import Checkpoint
from trt_kvcache.checkpoint.quantized.gguf import BlockValues
from trt_kvcache.checkpoint.quantized.offset_blocks import OffsetBlocks
from trt_kvcache.checkpoint.quantized.super_blocks import SuperBlocks

#: A table as it is stored; its rows are whole blocks.
TableBlocks: TypeAlias = BlockValues | SuperBlocks | OffsetBlocks

_INTEGERS = ("int4", "int8")


def table_blocks(checkpoint: Checkpoint, name: str) -> TableBlocks | None:
    """Return a table over the memory of its file; None for a table that is stored in another way."""
    weight = checkpoint.quantized_weight(name)
    if weight is None:
        return checkpoint.super_blocks(name) or checkpoint.offset_blocks(name)
    values = weight.quantized_values
    return values if isinstance(values, BlockValues) and values.kind in _INTEGERS and weight.row_order is None else None
