"""``KVRows``: the K/V rows of all layers of a cache as the kernels see them, one group of layers per head dim."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trt_kvcache.cache.config import KVCacheConfig
from trt_kvcache.errors import ShapeError
from trt_kvcache.kernels import (
    AnyCompactionPlan,
    KVLayerInfos,
    compact_kv_cache_batched,
    instantiate_kv_cache_batched,
    save_kv_cache_batched,
)
from trt_kvcache.kernels.layer_views import SAVED_NDIM
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.saved_tensors import allocate_tensors, check_saved
from trt_kvcache.memory.tensor import DeviceTensor


@dataclass(frozen=True)
class KVHeadDimGroup:
    """The attention layers of one head dim: what a kernel launch over all of them takes (seed 003, ``KVHeadDimGroupView``).

    Parameters
    ----------
    layer_infos
        Addresses and strides, on the device and on the host. The cache's: they close with it.
    attn_layer_indices : tuple of int
        Which attention layers these are, in the order of the infos.
    """

    layer_infos: KVLayerInfos
    attn_layer_indices: tuple[int, ...]

    @property
    def device_layer_infos(self) -> DeviceTensor:
        """The array of layer infos in the cache's memory. Raises :class:`ClosedError` after the cache's ``close``."""
        return self.layer_infos.device_layer_infos

    @property
    def num_layers(self) -> int:
        """Layers of the group."""
        return self.layer_infos.num_layers

    @property
    def head_dim(self) -> int:
        """Elements of a row, D, the same in all layers of the group."""
        return self.layer_infos.head_dim

    @property
    def max_kv_heads(self) -> int:
        """The most key-value heads that a layer of the group has."""
        return self.layer_infos.max_kv_heads


class KVRows:
    """K and V of all layers, moved, captured and restored: :class:`~trt_kvcache.cache.slot_contents.SlotContents`.

    Parameters
    ----------
    groups : sequence of KVHeadDimGroup
        Each attention layer is in one.
    """

    is_recurrent = False

    def __init__(self, kv: KVCacheConfig, memory: Memory, groups: Sequence[KVHeadDimGroup]) -> None:
        self._kv = kv
        self._memory = memory
        #: One group per head dim.
        self.groups = tuple(groups)

    def resize(self, lengths: Sequence[int], *, stream: Any) -> None:
        """Do nothing: rows stay where they are."""

    def reset_slots(self, slots: Sequence[int], *, stream: Any) -> None:
        """Do nothing: rows past a slot's length are never read as data."""

    def compact(self, plan: AnyCompactionPlan, *, stream: Any) -> None:
        """Move the live rows of slots, in one launch per group."""
        for group in self.groups:
            compact_kv_cache_batched(group.layer_infos, plan, stream=stream)

    def capture(self, slot: int, sequence_length: int, *, stream: Any) -> list[DeviceTensor]:
        """Copy the first rows of a slot into new tensors ``[2, H_i, sequence_length, D_i]``, in one launch per group."""
        saved = allocate_tensors(self._memory, self._saved_shapes(sequence_length), self._kv.dtype, stream=stream)
        for group, infos in self._groups_of(saved, stream):
            save_kv_cache_batched(group.layer_infos, infos, slot, sequence_length, stream=stream)
        return saved

    def restore(self, saved: Sequence[DeviceTensor], slot: int, *, stream: Any) -> None:
        """Copy captured rows to the front of a slot, in one launch per group, after all checks."""
        sequence_length = self._sequence_length_of(saved)
        check_saved(saved, self._saved_shapes(sequence_length), self._kv.dtype, self._memory, per="attention layer")
        for group, infos in self._groups_of(saved, stream):
            instantiate_kv_cache_batched(group.layer_infos, infos, slot, sequence_length, stream=stream)

    def _saved_shapes(self, sequence_length: int) -> list[tuple[int, ...]]:
        return [(2, layer.num_kv_heads, sequence_length, layer.head_dim) for layer in self._kv.layers]

    def _sequence_length_of(self, saved: Sequence[DeviceTensor]) -> int:
        """Return the tokens that saved tensors hold, as the first says; 0 if there is none to ask, which the check will find."""
        first = saved[0] if isinstance(saved, Sequence) and saved else None
        if not isinstance(first, DeviceTensor):
            return 0
        if first.ndim != SAVED_NDIM:
            raise ShapeError(f"saved[0]: expected a tensor [2, H, n, D], got {first!r}.")
        tokens = first.shape[2]
        if tokens > self._kv.max_sequence_length:
            raise ShapeError(
                f"saved[0]: expected at most max_sequence_length={self._kv.max_sequence_length} tokens, got {tokens} in {first!r}."
            )
        return tokens

    def _groups_of(self, saved: Sequence[DeviceTensor], stream: Any) -> list[tuple[KVHeadDimGroup, KVLayerInfos]]:
        return [(group, KVLayerInfos([saved[index] for index in group.attn_layer_indices], stream=stream)) for group in self.groups]
