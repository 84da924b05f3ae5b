"""``KVCacheBase``: what the K/V caches of seeds 000 and 001 share. They differ in how many allocations hold the layers."""

from collections.abc import Sequence
from typing import Any

from trt_kvcache._util.checks import int_in_range, layer_index, slot_index
from trt_kvcache.cache.config import KVCacheConfig
from trt_kvcache.cache.kv_head_dim_group import KVHeadDimGroup
from trt_kvcache.cache.kv_layer_config import KVLayerConfig
from trt_kvcache.cache.kv_layers import KVLayers, LayerPlace
from trt_kvcache.cache.lengths import Lengths
from trt_kvcache.cache.slot_cache import SlotCache
from trt_kvcache.kernels import KVLayerInfos
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.graph_capture import refuse_capture
from trt_kvcache.memory.tensor import DeviceTensor


class KVCacheBase(SlotCache):
    """A cache of K and V, with the same operations however the layers are allocated. Not thread-safe.

    A constructor of a subclass allocates the bytes of the layers and hands them to ``_set_layers``.

    Parameters
    ----------
    kv : KVCacheConfig
        The cache described layer by layer.
    memory : Memory
        Where it lives: ``HostMemory`` or ``CudaMemory``.
    lengths : Lengths, optional
        Lengths that are shared with other managers.

    Notes
    -----
    Memory, shared lengths and errors: see :class:`~trt_kvcache.cache.slot_cache.SlotCache`.
    """

    _layers: KVLayers

    def __init__(self, kv: KVCacheConfig, *, memory: Memory, lengths: Lengths | None = None) -> None:
        super().__init__(kv.max_batch_size, kv.max_sequence_length, memory=memory, lengths=lengths)
        self._kv = kv

    def _set_layers(self, places: Sequence[LayerPlace], stream: Any) -> None:
        self._layers = KVLayers(self._kv, places, self._resources, stream=stream)
        self._contents.append(self._layers)

    @property
    def kv_config(self) -> KVCacheConfig:
        """The cache described layer by layer."""
        return self._kv

    @property
    def num_layers(self) -> int:
        """Attention layers, L."""
        return self._kv.num_layers

    @property
    def is_uniform(self) -> bool:
        """Whether all layers have the same ``num_kv_heads`` and ``head_dim``."""
        return self._kv.is_uniform

    @property
    def nbytes(self) -> int:
        """Bytes of K and V as allocated, padding and scales included; lengths and layer infos are not counted."""
        return self._kv.nbytes

    @property
    def kv_head_dim_groups(self) -> tuple[KVHeadDimGroup, ...]:
        """The layers by head dim, as kernels take them: one group if all layers have the same."""
        self._check_open()
        return self._layers.groups

    @property
    def kv_scale_rows(self) -> KVLayerInfos | None:
        """The scales by token of all layers, in rows of four tokens, as kernels move them; None without such scales."""
        self._check_open()
        return self._layers.scale_rows

    def get_layer_config(self, attn_layer_idx: int) -> KVLayerConfig:
        """Return the heads of one attention layer.

        Parameters
        ----------
        attn_layer_idx : int
            Index among the attention layers, from 0.

        Returns
        -------
        KVLayerConfig
            Its heads, head dim and scales.

        Raises
        ------
        LayerIndexError
            There is no such layer.
        """
        return self._kv.layers[layer_index(attn_layer_idx, self.num_layers)]

    def get_combined_kv_cache(self, attn_layer_idx: int) -> DeviceTensor:
        """Return K and V of one attention layer as one view.

        Parameters
        ----------
        attn_layer_idx : int
            Index among the attention layers, from 0.

        Returns
        -------
        DeviceTensor ``[B, 2, H, S, D]``
            Contiguous in the COMBINED layout; a strided view of the same bytes in the SEPARATE one.

        Raises
        ------
        LayerIndexError
            There is no such layer.
        """
        self._check_open()
        return self._layers.combined[layer_index(attn_layer_idx, self.num_layers)]

    def get_separate_kv_cache(self, attn_layer_idx: int) -> tuple[DeviceTensor, DeviceTensor]:
        """Return K and V of one attention layer as two views.

        Parameters
        ----------
        attn_layer_idx : int
            Index among the attention layers, from 0.

        Returns
        -------
        pair of DeviceTensor ``[B, H, S, D]``
            K, then V. Contiguous in the SEPARATE layout; strided views of the same bytes in the COMBINED one.

        Raises
        ------
        LayerIndexError
            There is no such layer.
        """
        self._check_open()
        return self._layers.separate[layer_index(attn_layer_idx, self.num_layers)]

    def get_kv_scales(self, attn_layer_idx: int) -> DeviceTensor | None:
        """Return the scales of one attention layer: real value = stored value * scale.

        Parameters
        ----------
        attn_layer_idx : int
            Index among the attention layers, from 0.

        Returns
        -------
        DeviceTensor ``[2, H]`` or ``[B, 2, H, S']`` float32, or None
            Static scales of the heads of K and of V, which are written once; or with ``scales="token"`` one for each token and head,
            which attention writes with the rows: strided like the combined view, with S' the smallest multiple of 4 from S on. None
            for a dtype without scales.

        Raises
        ------
        LayerIndexError
            There is no such layer.
        """
        self._check_open()
        index = layer_index(attn_layer_idx, self.num_layers)
        return self._layers.scales[index] if self._layers.scales else None

    def capture_kv_cache(self, slot: int, sequence_length: int, *, stream: Any) -> list[DeviceTensor]:
        """Copy the first tokens of a slot into new tensors. This allocates.

        Parameters
        ----------
        slot : int
            Any slot, active or not.
        sequence_length : int
            Tokens, ``0 <= n <= S``.
        stream : cuda.core.Stream
            The copies are ordered on it, one launch per head-dim group and one for scales by token; the call does not wait.

        Returns
        -------
        list of DeviceTensor ``[2, H_i, n, D_i]``
            One per attention layer: K, then V, contiguous, in the cache's dtype and memory, whatever the layout. They share one
            allocation. With ``scales="token"`` as many more, ``[2, H_i, n']`` float32, hold the scales of each layer, with n' the
            smallest multiple of 4 from n on. Static scales are not saved: they are part of the configuration.

        Raises
        ------
        SlotError, RangeError
            There is no such slot, or a slot cannot hold so many tokens.
        CapacityError
            The memory has no room for the copy.
        CaptureError
            The stream is capturing.

        Notes
        -----
        ``captureKVCache`` of seed 003.
        """
        self._check_open()
        index = slot_index(slot, self._kv.max_batch_size)
        number = int_in_range("sequence_length", sequence_length, 0, self._kv.max_sequence_length)
        refuse_capture(self._memory, "capture_kv_cache", stream)
        return self._layers.capture(index, number, stream=stream)

    def restore_kv_cache(self, saved: Sequence[DeviceTensor], slot: int, *, stream: Any) -> None:
        """Copy captured tokens to the front of a slot. Lengths stay as they are.

        Parameters
        ----------
        saved : sequence of DeviceTensor ``[2, H_i, n, D_i]``
            What ``capture_kv_cache`` returned, of this cache or of one with equal layers and dtype in the same memory; its layout
            and sizes may differ. Static scales should be the same, because the stored values are copied. The tensors must stay open
            until the copies are done.
        slot : int
            Any slot, active or not.
        stream : cuda.core.Stream
            The copies are ordered on it, one launch per head-dim group and one for scales by token; the call neither waits nor
            allocates.

        Raises
        ------
        SlotError
            There is no such slot.
        ShapeError, DTypeError, PlaceError, LayoutError, ClosedError
            The tensors do not fit the layers, are not contiguous, or are closed.
        CaptureError
            The stream is capturing.

        Notes
        -----
        ``restoreKVCache`` of seed 003.
        """
        self._check_open()
        refuse_capture(self._memory, "restore_kv_cache", stream)
        self._layers.restore(saved, slot, stream=stream)
