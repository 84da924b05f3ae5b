"""Scales of tokens and heads of a K/V layer, ``[B, 2, H, S']`` float32, as rows that kernels can move."""

from trt_kvcache.memory.shapes import ROW_GRANULE
from trt_kvcache.memory.tensor import DeviceTensor

#: Scales of consecutive tokens that make one row of 16 bytes.
SCALES_GRANULE = ROW_GRANULE // 4


def scales_in_rows(scales: DeviceTensor) -> DeviceTensor:
    """Return scales ``[B, 2, H, S']`` as a layer ``[B, 2, H, S' / 4, 4]``: kernels that move rows of K and V move these too.

    Parameters
    ----------
    scales : DeviceTensor ``[..., H, S']``
        float32, with S' a multiple of 4 and strides of 1 from token to token.
    """
    *outer, tokens = scales.shape
    return DeviceTensor(
        scales.allocation,
        shape=(*outer, tokens // SCALES_GRANULE, SCALES_GRANULE),
        dtype=scales.dtype,
        strides=(*scales.strides[:-1], SCALES_GRANULE * scales.strides[-1], scales.strides[-1]),
        offset=scales.offset,
    )
