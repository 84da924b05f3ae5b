"""Q8_0, Q4_0 and MXFP4 of GGUF: blocks of 32 inputs, a scale and then the quantized values, as llama.cpp writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trt_kvcache.checkpoint.quantized.bit_planes import BitPlane, read_planes
from trt_kvcache.checkpoint.quantized.format import Arrays, QuantizedFormat, StoredPart, groups_of
from trt_kvcache.checkpoint.quantized.quantized_values import VALUE_BITS, QuantizedValues
from trt_kvcache.checkpoint.quantized.weight import QuantizedWeight, Scales

BLOCK = 32

#: Supported types, and their kind of quantized value.
TYPES = {"Q8_0": "int8", "Q4_0": "int4", "MXFP4": "e2m1"}

#: Bytes of the scale of a block, float16 or e8m0, and of the whole block, by the kind of its values.
_SCALE_BYTES = {"int8": 2, "int4": 2, "e2m1": 1}
_BLOCK_BYTES = {kind: scale + BLOCK * VALUE_BITS[kind] // 8 for kind, scale in _SCALE_BYTES.items()}

#: Places of the values in a block: int8 in order; of 4 bits the first 16 in the low nibbles, then in the high ones.
_PLANES = {kind: (BitPlane(scale, BLOCK * VALUE_BITS[kind] // 8, parts=1, bits=VALUE_BITS[kind]),) for kind, scale in _SCALE_BYTES.items()}


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockValues(QuantizedValues):
    """Quantized values after the scale of each block."""

    def bytes_of(self, rows: slice) -> npt.NDArray[np.uint8]:
        """Return the blocks of rows, ``[rows, blocks, bytes]``: see :class:`QuantizedValues`."""
        stored = self.stored[rows]
        return stored.reshape(len(stored), self.shape[1] // BLOCK, -1)

    def separated(self, stored: Any, rows: slice, empty: Callable[[tuple[int, ...]], Any]) -> Any:
        """Return one value an element: see :class:`QuantizedValues`."""
        return block_values(stored, self.kind, empty)

    def scale_bytes(self, stored: Any) -> Any:
        """Return the bytes of the scales of :meth:`bytes_of`, ``[rows, blocks, bytes]``, in an array of NumPy or a tensor of torch."""
        return block_scale_bytes(stored, self.kind)


def block_values(blocks: Any, kind: str, empty: Callable[[tuple[int, ...]], Any]) -> Any:
    """Return the quantized values of blocks ``[rows, blocks, bytes]`` modulo 256, uint8 ``[rows, columns]``, as ``empty`` makes arrays."""
    values = empty((*blocks.shape[:2], BLOCK))
    read_planes(blocks, _PLANES[kind], values)
    if kind == "int4":
        values -= 8
    return values.reshape(len(blocks), -1)


def block_scale_bytes(blocks: Any, kind: str) -> Any:
    """Return the bytes of the scales of blocks ``[rows, blocks, bytes]``."""
    return blocks[..., : _SCALE_BYTES[kind]]


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
        values = BlockValues(stored=stored, kind=kind, shape=shape)
        scales = values.scale_bytes(values.bytes_of(slice(None))).view(ml_dtypes.float8_e8m0fnu if kind == "e2m1" else np.float16)[..., 0]
        return QuantizedWeight(quantized_values=values, scales=Scales(stored=scales, block=(1, BLOCK)))

    def describe(self) -> dict[str, Any]:
        """Return the fields that decide how the tensors are read."""
        return {"format": "gguf"}
