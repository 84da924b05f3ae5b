"""Shapes, strides, offsets and sizes of storage. Only this module knows the strides of K and V.

Notation: B = max_batch_size, H = num_kv_heads, S = max_sequence_length, D = head_dim.

    COMBINED  [B, 2, H, S, D]   slot 0: K | V   slot 1: K | V ...
    SEPARATE  [2, B, H, S, D]   K: slot 0 | slot 1 ...   V: slot 0 | slot 1 ...

Two strides describe a layer, so every view of either layout has the same formula: element ``(slot, kv, h, s, d)`` is at element
``slot * slot_stride + kv * kv_stride + (h * S + s) * D + d``.
"""

from dataclasses import dataclass
from enum import Enum

from trt_kvcache.dtypes import itemsize
from trt_kvcache.memory.shapes import align_up, dense_nbytes


class KVLayout(Enum):
    """Order of K and V of a layer in memory. See :mod:`trt_kvcache.cache.layout`."""

    #: ``[B, 2, H, S, D]``: the attention plugin binds the combined view.
    COMBINED = "combined"
    #: ``[2, B, H, S, D]``: TensorRT's KVCacheUpdate and attention layers bind K and V, each contiguous.
    SEPARATE = "separate"


@dataclass(frozen=True)
class KVLayerStorage:
    """Shape and strides of K and V of one layer, inside the bytes of the layer. Strides count elements."""

    max_batch_size: int
    num_kv_heads: int
    max_sequence_length: int
    head_dim: int
    dtype: str
    layout: KVLayout
    #: Elements from one slot to the next.
    slot_stride: int
    #: Elements from K to V of a slot.
    kv_stride: int
    #: Bytes of the layer, padded to a multiple of ``ALIGNMENT``.
    nbytes: int

    @property
    def head_strides(self) -> tuple[int, int, int]:
        """Strides of ``[H, S, D]``."""
        return (self.max_sequence_length * self.head_dim, self.head_dim, 1)

    @property
    def head_shape(self) -> tuple[int, int, int]:
        """The shape ``[H, S, D]``."""
        return (self.num_kv_heads, self.max_sequence_length, self.head_dim)

    @property
    def combined_shape(self) -> tuple[int, ...]:
        """The shape ``[B, 2, H, S, D]``."""
        return (self.max_batch_size, 2, *self.head_shape)

    @property
    def combined_strides(self) -> tuple[int, ...]:
        """Strides of ``[B, 2, H, S, D]`` over this storage."""
        return (self.slot_stride, self.kv_stride, *self.head_strides)

    @property
    def separate_shape(self) -> tuple[int, ...]:
        """The shape ``[B, H, S, D]`` of K, and of V."""
        return (self.max_batch_size, *self.head_shape)

    @property
    def separate_strides(self) -> tuple[int, ...]:
        """Strides of ``[B, H, S, D]`` over this storage; V starts ``kv_stride`` elements after K."""
        return (self.slot_stride, *self.head_strides)


def kv_layer_storage(
    *, max_batch_size: int, num_kv_heads: int, max_sequence_length: int, head_dim: int, dtype: str, layout: KVLayout
) -> KVLayerStorage:
    """Return the storage of one layer. The layer, and in the SEPARATE layout V too, starts at a multiple of ``ALIGNMENT`` bytes."""
    slot_kv = num_kv_heads * max_sequence_length * head_dim
    size = itemsize(dtype)
    if layout is KVLayout.COMBINED:
        slot_stride, kv_stride = 2 * slot_kv, slot_kv
        nbytes = align_up(max_batch_size * slot_stride * size)
    else:
        padded = align_up(max_batch_size * slot_kv * size)
        slot_stride, kv_stride = slot_kv, padded // size
        nbytes = 2 * padded
    return KVLayerStorage(
        max_batch_size,
        num_kv_heads,
        max_sequence_length,
        head_dim,
        dtype,
        layout,
        slot_stride=slot_stride,
        kv_stride=kv_stride,
        nbytes=nbytes,
    )


@dataclass(frozen=True, kw_only=True)
class StateStorage:
    """Shape and size of the states of one kind in one buffer: a contiguous tensor ``[B, ...]`` per layer, one layer after another."""

    num_layers: int
    #: ``[B, ...]`` of one layer.
    shape: tuple[int, ...]
    dtype: str

    @property
    def slot_shape(self) -> tuple[int, ...]:
        """The shape of the state of one slot in one layer."""
        return self.shape[1:]

    @property
    def slot_nbytes(self) -> int:
        """Bytes of the states of one slot over all layers, without padding."""
        return self.num_layers * dense_nbytes(self.slot_shape, self.dtype)

    @property
    def layer_nbytes(self) -> int:
        """Bytes from one layer to the next, a multiple of :data:`~trt_kvcache.memory.shapes.ALIGNMENT`."""
        return align_up(dense_nbytes(self.shape, self.dtype))

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.num_layers * self.layer_nbytes
