"""GGUF: blocks of 32 inputs, a scale and then the quantized values, as llama.cpp writes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trt_kvcache.checkpoint.quantized.format import Arrays, QuantizedFormat, StoredPart, groups_of
from trt_kvcache.checkpoint.quantized.quantized_values import VALUE_BITS, QuantizedValues
from trt_kvcache.checkpoint.quantized.weight import QuantizedWeight, Scales

BLOCK = 32

#: Supported types, and their kind of quantized value.
TYPES = {"Q8_0": "int8", "Q4_0": "int4", "MXFP4": "e2m1"}

#: Bytes of the scale of a block, float16 or e8m0, and of the whole block, by the kind of its values.
_SCALE_BYTES = {"int8": 2, "int4": 2, "e2m1": 1}
_BLOCK_BYTES = {kind: scale + BLOCK * VALUE_BITS[kind] // 8 for kind, scale in _SCALE_BYTES.items()}


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockValues(QuantizedValues):
    """Quantized values after the scale of each block: int8 in order; of 4 bits the first 16 in the low nibbles, then in the high ones."""

    def unpacked(self, rows: slice = slice(None)) -> npt.NDArray[Any]:
        """Return one value an element: see :class:`QuantizedValues`."""
        stored = self.stored[rows]
        blocks = stored.reshape(len(stored), self.shape[1] // BLOCK, -1)[:, :, _SCALE_BYTES[self.kind] :]
        if self.kind == "int8":
            whole: npt.NDArray[Any] = blocks.reshape(len(stored), self.shape[1]).view(np.int8)
            return whole
        nibbles = np.concatenate([blocks & 15, blocks >> 4], axis=2).reshape(len(stored), self.shape[1])
        values: npt.NDArray[Any] = nibbles if self.kind == "e2m1" else nibbles.view(np.int8) - np.int8(8)
        return values


class GGUF(QuantizedFormat):
    """``weight`` as bytes ``[out, in / 32 * bytes of a block]``: a scale, then 32 quantized values."""

    name = "GGUF"
    kinds = tuple(TYPES.values())

    def __init__(self, dtypes: Iterable[str], dequantized: Iterable[str] = ()) -> None:
        packed = " and ".join(f"GGUF {name}" for name in sorted(set(dtypes) & set(TYPES))) or "GGUF"
        others = ", ".join(sorted(set(dequantized)))
        self.title = f"{packed}, {others} dequantized" if others else packed
        self._kinds = {nbytes: kind for kind, nbytes in _BLOCK_BYTES.items()}

    def main_part(self, module: str) -> str:
        """Return ``"weight"``."""
        return "weight"

    def parts(self, module: str, shape: tuple[int, int]) -> Mapping[str, StoredPart]:
        """Return the tensors of a weight: see :class:`QuantizedFormat`."""
        return {"weight": StoredPart((shape,), tuple(TYPES))}

    def weight(self, module: str, arrays: Arrays, shape: tuple[int, int]) -> QuantizedWeight:
        """Return a weight over its tensor: see :class:`QuantizedFormat`."""
        stored = arrays["weight"]
        blocks = groups_of(module, shape[1], BLOCK)
        kind = self._kinds[stored.shape[1] // blocks]
        parts = np.ascontiguousarray(stored.reshape(shape[0], blocks, -1)[:, :, : _SCALE_BYTES[kind]])
        scales = parts.view(ml_dtypes.float8_e8m0fnu if kind == "e2m1" else np.float16)[..., 0]
        return QuantizedWeight(
            quantized_values=BlockValues(stored=stored, kind=kind, shape=shape), scales=Scales(stored=scales, block=(1, BLOCK))
        )

    def describe(self) -> dict[str, Any]:
        """Return the fields that decide how the tensors are read."""
        return {"format": "gguf"}
