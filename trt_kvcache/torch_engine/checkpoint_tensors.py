"""``CheckpointTensors``: reads the tensors of a checkpoint onto a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from trt_kvcache.checkpoint.checkpoint import Checkpoint
from trt_kvcache.checkpoint.decoder_weights import RoundedTensors
from trt_kvcache.checkpoint.quantized.super_blocks import SuperBlocks
from trt_kvcache.checkpoint.quantized.table_blocks import table_blocks
from trt_kvcache.checkpoint.quantized.weight import QuantizedWeight
from trt_kvcache.kernels.compile import compile_ahead
from trt_kvcache.memory.base import Memory
from trt_kvcache.model.weight_parts import expert_tensors
from trt_kvcache.torch_engine.kernel_variants import packed_variants
from trt_kvcache.torch_engine.offset_block_rows import dequantized_offset_blocks
from trt_kvcache.torch_engine.packed_matrix import PackedMatrix
from trt_kvcache.torch_engine.packed_weight import PackedWeight
from trt_kvcache.torch_engine.packing import packed_weight, rounded_weight
from trt_kvcache.torch_engine.row_lookup import HostRows
from trt_kvcache.torch_engine.stored_rows import StoredRows
from trt_kvcache.torch_engine.super_block_rows import dequantized_super_blocks
from trt_kvcache.torch_engine.super_block_weight import SuperBlockWeight
from trt_kvcache.torch_engine.upload import Upload
from trt_kvcache.torch_engine.uploaded_rows import dequantized


def dequantizes(device: torch.device) -> bool:
    """Return True if a device dequantizes faster than NumPy: all but a CPU, on whose caches the parts of NumPy's arrays are cut."""
    return str(device.type) != "cpu"


class CheckpointTensors:
    """Tensors of a checkpoint, rounded to ``dtype`` or packed. ``progress(done_bytes, total_bytes)`` is called with each tensor."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: str,
        device: torch.device,
        memory: Memory,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        self._checkpoint, self._dtype, self._memory = checkpoint, dtype, memory
        self._upload = Upload(device)
        self._rounded = RoundedTensors(checkpoint, dtype, progress)
        self._experts = expert_tensors(checkpoint.config)
        self._last: tuple[str, QuantizedWeight | SuperBlocks | None] = ("", None)

    def load(self, name: str) -> torch.Tensor:
        """Return a tensor. Its values are rounded once, or not at all: tensors of routers are float32."""
        is_exact = name in self._rounded.exact
        found = self._dequantized(name) if not is_exact and dequantizes(self._upload.device) else None
        if found is not None:
            self._rounded.count(name)
            return found
        values = self._rounded(name)
        return self._upload(values.astype(np.float32 if is_exact else self._rounded.dtype, copy=False))

    def _dequantized(self, name: str) -> torch.Tensor | None:
        """Return a quantized tensor, dequantized on the device; None for others, and for values that the host refuses."""
        stored, dtype = self._stored(name), getattr(torch, self._dtype)
        if isinstance(stored, QuantizedWeight):
            return dequantized(stored, dtype, self._upload)
        if isinstance(stored, SuperBlocks):
            return dequantized_super_blocks(stored, dtype, self._upload)
        offset = self._checkpoint.offset_blocks(name)
        return None if offset is None else dequantized_offset_blocks(offset, dtype, self._upload)

    def load_rows(self, name: str) -> StoredRows | None:
        """Return a table whose rows stay as a GGUF file stores them; None for other tables."""
        stored = table_blocks(self._checkpoint, name)
        found = None if stored is None else StoredRows.of(stored, getattr(torch, self._dtype), self._upload)
        if found is not None:
            self._rounded.count(name)
        return found

    def load_host_rows(self, name: str) -> StoredRows | HostRows:
        """Return a table in pinned host memory: in the blocks of a GGUF file, or in the dtype."""
        stored = table_blocks(self._checkpoint, name)
        found = None if stored is None else StoredRows.of(stored, getattr(torch, self._dtype), self._upload, host=self._memory)
        if found is None:
            return HostRows.of(self._rounded(name), self._dtype, self._memory)
        self._rounded.count(name)
        return found

    def load_packed(self, name: str, rows: Sequence[slice | list[int]]) -> PackedMatrix | None:
        """Return some rows of a quantized weight, packed; None if it is not quantized, or the kernels do not know its format."""
        packed = self._rounded_weight(name, rows) or self._packed_weight(name, rows)
        if packed is None:
            return None
        self._rounded.count(name)
        compile_ahead(packed_variants(packed, self._dtype, of_expert=name in self._experts), self._memory.arch)  # type: ignore[attr-defined]  # a GPU
        return packed

    def _rounded_weight(self, name: str, rows: Sequence[slice | list[int]]) -> PackedWeight | None:
        unrounded = self._checkpoint.unrounded(name)
        if unrounded is None:
            return None
        values, scheme, scales_dtype = unrounded
        chosen = values[rows[0]] if len(rows) == 1 else np.concatenate([values[some] for some in rows])
        return rounded_weight(chosen, scheme, scales_dtype, self._dtype, self._upload, self._memory)

    def _packed_weight(self, name: str, rows: Sequence[slice | list[int]]) -> PackedMatrix | None:
        weight = self._stored(name) or self._as_int8(name)
        if weight is None:
            return None
        if isinstance(weight, QuantizedWeight):
            if name in self._experts and weight.group_index is not None:  # act-order: each expert would have an order of its own
                return None
            return packed_weight([weight.rows(some) for some in rows], self._dtype, self._upload, self._memory)
        return SuperBlockWeight.of(weight.of_rows(rows), self._dtype, self._upload, self._memory)

    def _as_int8(self, name: str) -> QuantizedWeight | None:
        """Return a weight in blocks of GGUF that are 8-bit integers to the kernels."""
        offset = self._checkpoint.offset_blocks(name)
        return None if offset is None else offset.as_int8()

    def _stored(self, name: str) -> QuantizedWeight | SuperBlocks | None:
        """Return a weight as it is stored; None if it is not quantized. The last one is kept."""
        if self._last[0] != name:  # reading may round all of it, or bring its rows into another order
            quantized = self._checkpoint.quantized_weight(name)
            self._last = name, self._checkpoint.super_blocks(name) if quantized is None else quantized
        return self._last[1]
