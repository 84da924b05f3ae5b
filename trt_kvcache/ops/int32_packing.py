"""Quantized K and V packed as int32, four values each, which plugin layers of TensorRT take.

TensorRT interprets 8-bit types. int8 is a quantized type, for which TensorRT may require scales. FP8 needs compute capability 8.9. Plugins
take no uint8. The cache of a plugin layer must be opaque bytes, as int32 is in every release and on every GPU.
"""

from collections.abc import Sequence
from dataclasses import replace

from trt_kvcache.dtypes import SCALED_KV_DTYPES
from trt_kvcache.engine.protocol import TensorSpec
from trt_kvcache.ops.custom_op import TensorType

#: Head dims of the attention kernels are multiples of it.
VALUES_PER_INT32 = 4


def is_packed_as_int32(tensor: TensorSpec | TensorType) -> bool:
    """Return whether plugin layers take a tensor packed as int32: K and V in ``float8_e4m3fn`` or ``int8``."""
    return tensor.dtype in SCALED_KV_DTYPES


def packed_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the int32 shape ``[..., D / 4]`` of values ``[..., D]``."""
    *sizes, head_dim = shape
    return *sizes, head_dim // VALUES_PER_INT32


def unpacked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape ``[..., D]`` of values packed as int32 ``[..., D / 4]``."""
    *sizes, words = shape
    return *sizes, words * VALUES_PER_INT32


def packed_as_int32(spec: TensorSpec) -> TensorSpec:
    """Return a tensor of an engine as plugin layers take it."""
    return replace(spec, shape=packed_shape(spec.shape), dtype="int32") if is_packed_as_int32(spec) else spec
