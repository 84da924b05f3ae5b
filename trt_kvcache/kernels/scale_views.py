"""Scales by token and head of a K/V layer, ``[B, 2, H, S']`` float32 with S' a multiple of 4, as rows that kernels can move."""

from collections.abc import Sequence
from typing import Any

from trt_kvcache.kernels.layer_infos import KVLayerInfos
from trt_kvcache.memory.shapes import SCALES_GRANULE
from trt_kvcache.memory.tensor import DeviceTensor


def saved_scales(tokens: int) -> int:
    """Return the scales of a head that are saved with some tokens: rounded up to rows of four."""
    return -(-tokens // SCALES_GRANULE) * SCALES_GRANULE


def scales_in_rows(scales: DeviceTensor) -> DeviceTensor:
    """Return scales ``[..., H, S']`` as rows ``[..., H, S' / 4, 4]``: kernels that move rows of K and V move scales too."""
    *outer, tokens = scales.shape
    return DeviceTensor(
        scales.allocation,
        shape=(*outer, tokens // SCALES_GRANULE, SCALES_GRANULE),
        dtype=scales.dtype,
        strides=(*scales.strides[:-1], SCALES_GRANULE * scales.strides[-1], scales.strides[-1]),
        offset=scales.offset,
    )


def single_scales(rows: DeviceTensor) -> DeviceTensor:
    """Return rows ``[..., H, S' / 4, 4]`` of scales as rows of one scale, ``[..., H, S', 1]``."""
    *outer, count, granule = rows.shape
    return DeviceTensor(
        rows.allocation, shape=(*outer, count * granule, 1), dtype=rows.dtype, strides=(*rows.strides[:-2], 1, 1), offset=rows.offset
    )


def scale_infos(scales: Sequence[DeviceTensor], *, stream: Any) -> KVLayerInfos:
    """Return the infos of the scales of layers, for kernels that move rows."""
    return KVLayerInfos([scales_in_rows(tensor) for tensor in scales], tokens_per_row=SCALES_GRANULE, stream=stream)
