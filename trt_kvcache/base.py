"""``KVCacheBase``: what the K/V caches of seeds 000 and 001 share. They differ in how many allocations hold the layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np

from trt_kvcache.checks import layer_index
from trt_kvcache.config import KVCacheConfig, KVLayerConfig
from trt_kvcache.dtypes import itemsize
from trt_kvcache.errors import ClosedError, ConfigError, PlaceError
from trt_kvcache.lengths import Lengths
from trt_kvcache.memory import Allocation, Memory
from trt_kvcache.tensor import DeviceTensor
from trt_kvcache.uncopyable import Uncopyable


class KVCacheBase(Uncopyable, ABC):
    """Views, lengths and life of a K/V cache. Not thread-safe.

    Parameters
    ----------
    kv : KVCacheConfig
        The cache layer by layer.
    memory : Memory
        Where it lives.
    lengths : Lengths, optional
        Shared lengths; without, the cache makes its own.

    Raises
    ------
    CapacityError
        An allocation failed; those made before were released.
    ConfigError, PlaceError
        ``lengths`` have other sizes, or live elsewhere.

    Notes
    -----
    All memory is allocated, as zeros, by the constructor, which waits for that. Addresses never change.
    """

    def __init__(self, kv: KVCacheConfig, *, memory: Memory, lengths: Lengths | None = None) -> None:
        if lengths is not None and (lengths.max_batch_size != kv.max_batch_size or lengths.max_sequence_length != kv.max_sequence_length):
            raise ConfigError(
                f"lengths: expected those of {kv.max_batch_size} slots of {kv.max_sequence_length} tokens, got "
                f"{lengths.max_batch_size} slots of {lengths.max_sequence_length}."
            )
        if lengths is not None and lengths.memory is not memory:
            raise PlaceError(f"lengths: expected those of the memory that the cache is in, got another one's ({lengths.memory.device}).")
        self._kv = kv
        self._memory = memory
        self._closed = False
        self._owned: list[Allocation | Lengths] = []
        try:
            stream = memory.create_stream()
            self._layers = self._allocate_layers(stream)
            self._scales = self._allocate_scales(stream)
            memory.synchronize(stream)
            if lengths is None:
                lengths = Lengths(kv.max_batch_size, kv.max_sequence_length, memory=memory)
                self._owned.append(lengths)
        except BaseException:
            self._release()
            raise
        self._lengths = lengths

    @abstractmethod
    def _allocate_layers(self, stream: Any) -> list[tuple[Allocation, int]]:
        """Return, per layer, the allocation that holds it and the byte at which it starts."""

    def _allocate(self, nbytes: int, stream: Any) -> Allocation:
        allocation = self._memory.allocate(nbytes, zeroed=True, stream=stream)
        self._owned.append(allocation)
        return allocation

    def _allocate_scales(self, stream: Any) -> DeviceTensor | None:
        if not self._kv.has_scales:
            return None
        scales = np.array([(layer.k_scale, layer.v_scale) for layer in self._kv.layers], np.float32)
        tensor = DeviceTensor(self._allocate(self._kv.scales_nbytes, stream), shape=scales.shape, dtype="float32")
        self._memory.upload(tensor, scales, stream=stream)
        return tensor

    # --- what it is ---

    @property
    def kv_config(self) -> KVCacheConfig:
        """The cache described layer by layer."""
        return self._kv

    @property
    def memory(self) -> Memory:
        """Where the cache lives."""
        return self._memory

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
        """Bytes of K and V as allocated, padding and scales included; the lengths are not in it."""
        return self._kv.nbytes

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def get_layer_config(self, attn_layer_idx: int) -> KVLayerConfig:
        """Return the heads of one attention layer. Raises :class:`LayerIndexError` out of range."""
        return self._kv.layers[layer_index(attn_layer_idx, self.num_layers)]

    # --- views ---

    def get_combined_kv_cache(self, attn_layer_idx: int) -> DeviceTensor:
        """Return K and V of one attention layer as one view.

        Parameters
        ----------
        attn_layer_idx : int
            Index among the attention layers, from 0.

        Returns
        -------
        DeviceTensor ``[B, 2, H, S, D]``
            Dense in the COMBINED layout; a strided view of the same bytes in the SEPARATE one.

        Raises
        ------
        LayerIndexError, ClosedError
        """
        allocation, start, index = self._layer(attn_layer_idx)
        storage = self._kv.storages[index]
        return DeviceTensor(allocation, shape=storage.combined_shape, dtype=storage.dtype, strides=storage.combined_strides, offset=start)

    def get_separate_kv_cache(self, attn_layer_idx: int) -> tuple[DeviceTensor, DeviceTensor]:
        """Return K and V of one attention layer as two views.

        Parameters
        ----------
        attn_layer_idx : int
            Index among the attention layers, from 0.

        Returns
        -------
        pair of DeviceTensor ``[B, H, S, D]``
            Dense in the SEPARATE layout; strided views of the same bytes in the COMBINED one.

        Raises
        ------
        LayerIndexError, ClosedError
        """
        allocation, start, index = self._layer(attn_layer_idx)
        storage = self._kv.storages[index]
        k, v = (
            DeviceTensor(
                allocation,
                shape=storage.separate_shape,
                dtype=storage.dtype,
                strides=storage.separate_strides,
                offset=start + which * storage.kv_stride * itemsize(storage.dtype),
            )
            for which in (0, 1)
        )
        return k, v

    @property
    def kv_scales(self) -> DeviceTensor | None:
        """K and V scale of each layer, float32 ``[L, 2]``; None for a dtype without scales."""
        self._check_open()
        return self._scales

    def _layer(self, attn_layer_idx: int) -> tuple[Allocation, int, int]:
        self._check_open()
        index = layer_index(attn_layer_idx, self.num_layers)
        return (*self._layers[index], index)

    # --- lengths ---

    @property
    def lengths(self) -> Lengths:
        """Device lengths, host mirror and active batch size."""
        return self._lengths

    @property
    def active_batch_size(self) -> int:
        """Active slots, A."""
        self._check_open()
        return self._lengths.active_batch_size

    @property
    def kv_cache_lengths(self) -> DeviceTensor:
        """Lengths of the active slots, int32 ``[A]`` in the cache's memory."""
        self._check_open()
        return self._lengths.active_tensor

    @property
    def host_kv_cache_lengths(self) -> tuple[int, ...]:
        """Lengths of the active slots, from the host mirror. Raises :class:`LengthsUnknown` where it is not exact."""
        self._check_open()
        return self._lengths.host

    @property
    def kv_cache_all_empty(self) -> bool:
        """Whether no active slot holds a token."""
        self._check_open()
        return self._lengths.all_empty

    def reset_for_new_sequences(self, reuse_lengths: Sequence[int] | np.ndarray[Any, Any], *, stream: Any) -> None:
        """Start anew with ``n = len(reuse_lengths)`` active slots. K and V are not cleared.

        Parameters
        ----------
        reuse_lengths : sequence of int, or NumPy integer array (n,)
            Tokens that each slot already holds, ``0 <= length <= S``; ``0 <= n <= B``.
        stream : cuda.core.Stream
            The change is ordered on it; the call neither waits nor allocates.

        Raises
        ------
        RangeError, ShapeError, DTypeError, PlaceError, CaptureError, ClosedError
            Nothing was changed.

        Notes
        -----
        ``resetForNewSequences`` of seeds 001 and 003.
        """
        self._check_open()
        self._lengths.reset(reuse_lengths, stream=stream)

    def commit_sequence_length(
        self, increment: int | Sequence[int] | np.ndarray[Any, Any] | DeviceTensor, *, max_increment: int | None = None, stream: Any
    ) -> None:
        """Count tokens that an enqueue has written: lengths += increment.

        Parameters
        ----------
        increment : int, sequence of int (A,), or DeviceTensor (A,) int32
            A number counts for all active slots. A prefix that was reused is not counted again.
        max_increment : int
            Only, and always, with a device tensor: none of its values exceeds this.
        stream : cuda.core.Stream or GraphBuilder
            The change is ordered on it; the call neither waits nor allocates. A number and a device tensor can be captured
            in a CUDA graph; then the host mirror stays, and whoever replays calls ``lengths.replayed``.

        Raises
        ------
        CapacityError
            A slot would exceed ``max_sequence_length``. Nothing was changed.
        RangeError, ShapeError, DTypeError, PlaceError, CaptureError, ClosedError
            Nothing was changed.

        Notes
        -----
        ``commitSequenceLength`` of seeds 001 and 003.
        """
        self._check_open()
        self._lengths.commit(increment, max_increment=max_increment, stream=stream)

    def sync_lengths(self, *, stream: Any) -> None:
        """Read the lengths from the device, after which the host knows them exactly. Waits for ``stream``."""
        self._check_open()
        self._lengths.sync_lengths(stream=stream)

    def set_active_batch_size(self, new_active_batch_size: int, *, stream: Any) -> None:
        """Keep the first ``n`` slots, or add slots of length 0. ``0 <= n <= B``.

        Raises
        ------
        RangeError, PlaceError, CaptureError, ClosedError
            Nothing was changed.

        Notes
        -----
        ``setActiveBatchSize`` of seeds 001 and 003; slots that are added come empty.
        """
        self._check_open()
        self._lengths.set_active_batch_size(new_active_batch_size, stream=stream)

    def clear_slot(self, slot: int, *, stream: Any) -> None:
        """Set the length of an active slot to 0. Its K and V stay, and are never read as data again.

        Raises
        ------
        SlotError, PlaceError, CaptureError, ClosedError
            Nothing was changed.
        """
        self._check_open()
        self._lengths.clear_slot(slot, stream=stream)

    def rewind(self, slot: int, length: int, *, stream: Any) -> None:
        """Shorten an active slot to its first ``length`` tokens.

        Raises
        ------
        SlotError, RangeError, LengthsUnknown, PlaceError, CaptureError, ClosedError
            Nothing was changed.
        """
        self._check_open()
        self._lengths.rewind(slot, length, stream=stream)

    # --- life ---

    def close(self) -> None:
        """Release the memory. Idempotent. Views raise :class:`ClosedError` from now on; DLPack consumers keep theirs."""
        self._closed = True
        self._release()

    def _release(self) -> None:
        while self._owned:
            self._owned.pop().close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"this {type(self).__name__} is closed.")

    def __enter__(self) -> Any:
        self._check_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
