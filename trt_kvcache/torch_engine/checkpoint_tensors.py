"""``CheckpointTensors``: reads the tensors of a checkpoint onto a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from trt_kvcache.checkpoint.checkpoint import Checkpoint
from trt_kvcache.checkpoint.decoder_weights import RoundedTensors
from trt_kvcache.checkpoint.quantized.super_blocks import SuperBlocks
from trt_kvcache.checkpoint.quantized.weight import QuantizedWeight
from trt_kvcache.kernels.compile import compile_ahead
from trt_kvcache.memory.base import Memory
from trt_kvcache.torch_engine.kernel_variants import packed_variant
from trt_kvcache.torch_engine.packed_matrix import PackedMatrix
from trt_kvcache.torch_engine.packed_weight import PackedWeight
from trt_kvcache.torch_engine.packing import packed_arrays
from trt_kvcache.torch_engine.super_block_weight import SuperBlockWeight
from trt_kvcache.torch_engine.upload import Upload


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
        self._last: tuple[str, QuantizedWeight | SuperBlocks | None] = ("", None)

    def load(self, name: str) -> torch.Tensor:
        """Return a tensor. Its values are rounded once, or not at all: tensors of routers are float32."""
        values = self._rounded(name)
        dtype = np.float32 if name in self._rounded.exact else self._rounded.dtype
        return self._upload(values.astype(dtype, copy=False))

    def load_packed(self, name: str, rows: Sequence[slice | list[int]]) -> PackedMatrix | None:
        """Return some rows of a quantized weight, packed; None if it is not quantized, or the kernels do not know its format."""
        if self._last[0] != name:  # reading may round all of it, or bring its rows into another order
            self._last = name, self._checkpoint.quantized_weight(name) or self._checkpoint.super_blocks(name)
        packed = None if self._last[1] is None else self._packed(self._last[1], rows)
        if packed is None:
            return None
        self._rounded.count(name)
        compile_ahead([packed_variant(packed, self._dtype)], self._memory.arch)  # type: ignore[attr-defined]  # a GPU
        return packed

    def _packed(self, stored: QuantizedWeight | SuperBlocks, rows: Sequence[slice | list[int]]) -> PackedMatrix | None:
        if isinstance(stored, SuperBlocks):
            return SuperBlockWeight.of(stored.of_rows(rows), self._dtype, self._upload, self._memory)
        arrays = packed_arrays([stored.rows(some) for some in rows], self._dtype)
        return None if arrays is None else PackedWeight.of(arrays, self._dtype, self._upload, self._memory)
