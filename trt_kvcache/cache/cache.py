"""``Cache``: slots with K and V, recurrent states and lengths. The base of all managers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from trt_kvcache._util.checks import int_in_range, layer_index, slot_index
from trt_kvcache._util.lifetime import Closable
from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.cache.config import DecoderCacheConfig, KVCacheConfig, LayerType, MambaCacheConfig
from trt_kvcache.cache.kv_head_dim_group import KVHeadDimGroup
from trt_kvcache.cache.kv_layer_config import KVLayerConfig
from trt_kvcache.cache.kv_layers import KVLayers
from trt_kvcache.cache.lengths import Lengths
from trt_kvcache.cache.recurrent_states import RecurrentStates, StateKind
from trt_kvcache.cache.resources import Resources
from trt_kvcache.cache.slot_contents import SlotContents
from trt_kvcache.errors import ConfigError, LayerIndexError, PlaceError, RangeError, ShapeError
from trt_kvcache.kernels import KVLayerInfos
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.graph_capture import refuse_capture
from trt_kvcache.memory.shapes import MAX_DIMENSION
from trt_kvcache.memory.tensor import DeviceTensor


class Cache(Closable):
    """Slots that hold K and V, recurrent states, or both, and the number of tokens in each slot. Not thread-safe.

    All memory is allocated, as zeros, by the constructor, which waits for that. Addresses never change.

    Parameters
    ----------
    config : DecoderCacheConfig
        The layers, sizes, dtypes and layout.
    memory : Memory
        Memory of K, V, states and lengths: ``HostMemory`` or ``CudaMemory``.
    lengths : Lengths, optional
        Lengths that are shared with other caches. If left out, the cache makes its own.

    Raises
    ------
    ConfigError, PlaceError
        ``memory`` is not a memory; or ``lengths`` are not lengths, have other sizes, or are in another memory.
    CapacityError
        An allocation failed. Earlier ones were released.

    Notes
    -----
    The managers are named as in TensorRT Edge-LLM: :class:`KVCacheManager`, :class:`LinearKVCache`, :class:`MambaCacheManager` and
    :class:`HybridCacheManager`. They differ in their configuration, in the number of allocations, and in the layer indices that getters
    take. Here ``layer_idx`` counts all layers, in the order of ``config.layer_types``.

    Methods that take a ``stream`` are stream-ordered; they neither wait nor allocate, unless they say so. A ``slot`` is any of the B
    slots, active or not, unless a method says otherwise. Besides the errors that a method names, all raise
    :class:`~trt_kvcache.errors.PlaceError` for a stream of another memory and :class:`~trt_kvcache.errors.ClosedError` once the
    cache is closed. If a method raises, nothing was changed.

    Operations on slots act on :attr:`lengths`, and so on every cache that shares these.

    With ``ping_pong`` states have two buffers: an enqueue reads the current states and writes the next ones. After an enqueue over all
    active slots call :meth:`swap`, after one over some of them :meth:`copy_back`. Everything else acts on the current states. A CUDA
    graph holds the addresses of one :attr:`parity`. Without ``ping_pong`` the next states are the current ones.
    """

    #: False for a cache whose slots may hold states without the K and V of their sequences. Handles, prefix caching and snapshots
    #: refuse it.
    holds_whole_sequences = True

    def __init__(self, config: DecoderCacheConfig, *, memory: Memory, lengths: Lengths | None = None) -> None:
        super().__init__()
        limit = config.max_sequence_length
        if lengths is not None:
            _check_shared(lengths, config.max_batch_size, None if config.kv is None else limit, memory)
        self._config = config
        self._memory = memory
        self._resources = Resources(memory)
        self._lengths = self._resources.add(Lengths(config.max_batch_size, limit, memory=memory)) if lengths is None else lengths
        self._kv: KVLayers | None = None
        self._states: RecurrentStates | None = None
        # Contents that this cache allocated, and attached to the lengths.
        self._own_contents: list[SlotContents] = []
        try:
            stream = memory.create_stream()
            contents = self._allocate(stream)
            memory.synchronize(stream)
        except BaseException:
            self._resources.close()
            raise
        for one in contents:
            self._lengths.attach(one)
        self._own_contents = contents

    def _allocate(self, stream: Any) -> list[SlotContents]:
        """Allocate K, V and states, and return the contents that must follow the lengths."""
        if self._config.kv is not None:
            self._kv = KVLayers(self._config.kv, self._resources, stream=stream, one_allocation=self._kv_in_one_allocation)
        if self._config.mamba is not None:
            self._states = RecurrentStates(self._config.mamba, self._resources, stream=stream)
        return [contents for contents in (self._kv, self._states) if contents is not None]

    #: True if all attention layers share one allocation, else each has its own.
    _kv_in_one_allocation = False

    def __repr__(self) -> str:
        kv, states = self.kv_config, self.mamba_config
        layers = [f"{kv.num_layers} attention layers in {kv.dtype}"] if kv is not None else []
        layers += [f"{states.num_layers} layers of states"] if states is not None else []
        limit = self._lengths.max_sequence_length
        length = "any length" if limit == MAX_DIMENSION else f"{limit} tokens"
        state = "closed" if self.closed else f"{self._lengths.active_batch_size} active"
        slots = f"{self.max_batch_size} slots of {length}, {state}"
        return f"{type(self).__name__}({', '.join([*layers, slots])}, on {self._memory.device})"

    @property
    def config(self) -> DecoderCacheConfig:
        """The configuration it was made with."""
        return self._config

    @property
    def memory(self) -> Memory:
        """The memory of the cache."""
        return self._memory

    @property
    def lengths(self) -> Lengths:
        """The lengths tensor, the mirror on the host, and the active batch size."""
        return self._lengths

    @property
    def kv_config(self) -> KVCacheConfig | None:
        """The attention layers, in their order; None if there are none."""
        return self._config.kv

    @property
    def mamba_config(self) -> MambaCacheConfig | None:
        """The recurrent layers, in their order; None if there are none."""
        return self._config.mamba

    @property
    def kv_layers(self) -> KVLayers | None:
        """K and V of the attention layers; None if there are none."""
        self._check_open()
        return self._kv

    @property
    def states(self) -> RecurrentStates | None:
        """States of the recurrent layers; None if there are none."""
        return self._states

    @property
    def layer_types(self) -> tuple[LayerType, ...]:
        """The types of all layers, in the order in which ``layer_idx`` counts them."""
        return self._config.layer_types

    @property
    def num_layers(self) -> int:
        """Layers of both types."""
        return len(self._config.layer_types)

    @property
    def num_recurrent_layers(self) -> int:
        """Recurrent layers."""
        return 0 if self._states is None else self._states.num_layers

    @property
    def is_uniform(self) -> bool:
        """True if all attention layers have the same ``num_kv_heads`` and ``head_dim``."""
        return self._config.kv is None or self._config.kv.is_uniform

    @property
    def nbytes(self) -> int:
        """Bytes of K, V and states as allocated, padding and scales included; lengths and infos for kernels are not counted."""
        return self._config.nbytes

    @property
    def kv_head_dim_groups(self) -> tuple[KVHeadDimGroup, ...]:
        """The attention layers by head dim, as kernels take them: one group if all have the same; empty without attention layers."""
        self._check_open()
        return () if self._kv is None else self._kv.groups

    @property
    def kv_scale_rows(self) -> KVLayerInfos | None:
        """The scales by token of all attention layers, in rows of four tokens, as kernels move them; None without such scales."""
        self._check_open()
        return None if self._kv is None else self._kv.scale_rows

    def get_layer_config(self, layer_idx: int) -> KVLayerConfig:
        """Return the heads of an attention layer.

        Parameters
        ----------
        layer_idx : int
            Index among all layers, from 0.

        Returns
        -------
        KVLayerConfig
            Its heads, head dim and scales.

        Raises
        ------
        LayerIndexError
            There is no such layer, or it is recurrent.
        """
        kv, index = self._attention_layer(layer_idx)
        return kv.config.layers[index]

    def get_combined_kv_cache(self, layer_idx: int) -> DeviceTensor:
        """Return K and V of an attention layer as one view.

        Parameters
        ----------
        layer_idx : int
            Index among all layers, from 0.

        Returns
        -------
        DeviceTensor ``[B, 2, H, S, D]``
            Contiguous in the COMBINED layout; a strided view of the same bytes in the SEPARATE one.

        Raises
        ------
        LayerIndexError
            There is no such layer, or it is recurrent.
        """
        kv, index = self._attention_layer(layer_idx)
        return kv.combined[index]

    def get_separate_kv_cache(self, layer_idx: int) -> tuple[DeviceTensor, DeviceTensor]:
        """Return K and V of an attention layer as two views.

        Parameters
        ----------
        layer_idx : int
            Index among all layers, from 0.

        Returns
        -------
        pair of DeviceTensor ``[B, H, S, D]``
            K, then V. Contiguous in the SEPARATE layout; strided views of the same bytes in the COMBINED one.

        Raises
        ------
        LayerIndexError
            There is no such layer, or it is recurrent.
        """
        kv, index = self._attention_layer(layer_idx)
        return kv.separate[index]

    def get_kv_scales(self, layer_idx: int) -> DeviceTensor | None:
        """Return the scales of an attention layer: real value = stored value * scale.

        Parameters
        ----------
        layer_idx : int
            Index among all layers, from 0.

        Returns
        -------
        DeviceTensor ``[2, H]`` or ``[B, 2, H, S']`` float32, or None
            Static scales of the heads of K and of V, which are written once; or with ``scales="token"`` one for each token and head,
            which attention writes with the rows: strided like the combined view, with S' the smallest multiple of 4 from S on. None
            for a dtype without scales.

        Raises
        ------
        LayerIndexError
            There is no such layer, or it is recurrent.
        """
        kv, index = self._attention_layer(layer_idx)
        return kv.scales[index] if kv.scales else None

    def get_recurrent_state(self, layer_idx: int) -> DeviceTensor:
        """Return the current recurrent state of a layer, which the next enqueue reads.

        Parameters
        ----------
        layer_idx : int
            Index among all layers, from 0.

        Returns
        -------
        DeviceTensor ``[B, num_heads, head_dim, state_size]``
            Contiguous.

        Raises
        ------
        LayerIndexError
            There is no such layer, or it is an attention layer.
        ConfigError
            The layers keep a conv state only.
        """
        return self._state(StateKind.RECURRENT, layer_idx)

    def get_conv_state(self, layer_idx: int) -> DeviceTensor:
        """Return the current conv state of a layer, which the next enqueue reads.

        Parameters
        ----------
        layer_idx : int
            Index among all layers, from 0.

        Returns
        -------
        DeviceTensor ``[B, conv_dim, conv_kernel]``
            Contiguous.

        Raises
        ------
        LayerIndexError
            There is no such layer, or it is an attention layer.
        """
        return self._state(StateKind.CONV, layer_idx)

    def get_next_recurrent_state(self, layer_idx: int) -> DeviceTensor:
        """Return the recurrent state of a layer that the next enqueue writes; without ``ping_pong`` it is the current one.

        Parameters
        ----------
        layer_idx : int
            Index among all layers, from 0.

        Returns
        -------
        DeviceTensor ``[B, num_heads, head_dim, state_size]``
            Contiguous.

        Raises
        ------
        LayerIndexError
            There is no such layer, or it is an attention layer.
        ConfigError
            The layers keep a conv state only.
        """
        return self._state(StateKind.RECURRENT, layer_idx, of_next=True)

    def get_next_conv_state(self, layer_idx: int) -> DeviceTensor:
        """Return the conv state of a layer that the next enqueue writes; without ``ping_pong`` it is the current one.

        Parameters
        ----------
        layer_idx : int
            Index among all layers, from 0.

        Returns
        -------
        DeviceTensor ``[B, conv_dim, conv_kernel]``
            Contiguous.

        Raises
        ------
        LayerIndexError
            There is no such layer, or it is an attention layer.
        """
        return self._state(StateKind.CONV, layer_idx, of_next=True)

    def _attention_layer(self, layer_idx: int) -> tuple[KVLayers, int]:
        self._check_open()
        index = self._index(layer_idx, LayerType.ATTENTION)
        assert self._kv is not None  # it has this layer
        return self._kv, index

    def _state(self, kind: StateKind, layer_idx: int, *, of_next: bool = False) -> DeviceTensor:
        self._check_open()
        index = self._index(layer_idx, LayerType.MAMBA)
        assert self._states is not None  # it has this layer
        if kind not in self._states.kinds:
            raise ConfigError(f"the recurrent layers have no {kind.value} state: num_heads is 0 in their configuration.")
        return (self._states.next if of_next else self._states.current)(kind).layers[index]

    def _index(self, layer_idx: int, layer_type: LayerType) -> int:
        """Return the index of a layer among the layers of its type."""
        types = self.layer_types
        index = layer_index(layer_idx, len(types), name="layer_idx")
        if types[index] is not layer_type:
            raise LayerIndexError(f"layer_idx {index}: expected a layer of kind {layer_type.value}, got {types[index].value}.")
        return types[:index].count(layer_type)

    @property
    def max_batch_size(self) -> int:
        """Slots, B."""
        return self._lengths.max_batch_size

    @property
    def active_batch_size(self) -> int:
        """Active slots, A. They are slots 0 to A-1."""
        self._check_open()
        return self._lengths.active_batch_size

    @property
    def kv_cache_lengths(self) -> DeviceTensor:
        """Lengths of the active slots, int32 ``[A]`` in the cache's memory."""
        self._check_open()
        return self._lengths.active_tensor

    @property
    def host_kv_cache_lengths(self) -> tuple[int, ...]:
        """Lengths of the active slots, from the mirror on the host.

        Raises
        ------
        LengthsUnknown
            The host does not know some length. :meth:`sync_lengths` reads them from the device.
        """
        self._check_open()
        return self._lengths.host

    @property
    def kv_cache_all_empty(self) -> bool:
        """True if no active slot holds a token."""
        self._check_open()
        return self._lengths.all_empty

    def reset_for_new_sequences(self, reuse_lengths: Sequence[int] | np.ndarray[Any, Any], *, stream: Any) -> None:
        """Make ``n = len(reuse_lengths)`` slots active for new sequences.

        K and V are not cleared. States of slots of length 0 are zeroed. The states of other slots must be restored first.

        Parameters
        ----------
        reuse_lengths : sequence of int, or NumPy integer array (n,)
            Tokens that each slot already holds, ``0 <= length <= S``; ``0 <= n <= B``.
        stream : cuda.core.Stream
            The writes are ordered on it.

        Raises
        ------
        RangeError, ShapeError, DTypeError, PlaceError
            ``reuse_lengths`` does not fit.
        CaptureError
            The stream is capturing: the values would be frozen into the CUDA graph.
        CapacityError
            A sequence of a ``SequenceCacheManager`` waits in a slot that becomes active, and cannot move to another place.

        Notes
        -----
        ``resetForNewSequences`` of ``LinearKVCache`` and ``HybridCacheManager``.
        """
        self._check_open()
        self._lengths.reset(reuse_lengths, stream=stream)

    def commit_sequence_length(
        self, increment: int | Sequence[int] | np.ndarray[Any, Any] | DeviceTensor, *, max_increment: int | None = None, stream: Any
    ) -> None:
        """Count the tokens that an enqueue has written: lengths += increment.

        Parameters
        ----------
        increment : int, sequence of int (A,), NumPy integer array (A,), or DeviceTensor (A,) int32
            Tokens to add: a number to all active slots, other values one to each. A prefix that was reused is not counted again. With no
            active slot there is nothing to add to, and nothing happens.
        max_increment : int, optional
            Upper bound of the values of a device tensor, which the host does not know. Required with one, else not allowed.
        stream : cuda.core.Stream or GraphBuilder
            The launch is ordered on it. A number and a device tensor can be captured in a CUDA graph. The mirror then stays as it
            is; call ``lengths.replayed`` before each replay of the graph.

        Raises
        ------
        CapacityError
            A slot would exceed S tokens.
        RangeError, ShapeError, DTypeError, PlaceError
            An argument does not fit.
        CaptureError
            The stream is capturing, and ``increment`` is a sequence or array on the host.

        Notes
        -----
        ``commitSequenceLength`` of ``LinearKVCache`` and ``HybridCacheManager``.
        """
        self._check_open()
        self._lengths.commit(increment, max_increment=max_increment, stream=stream)

    def sync_lengths(self, *, stream: Any) -> None:
        """Read the lengths from the device, after which the host knows them exactly. Waits for ``stream``.

        Parameters
        ----------
        stream : cuda.core.Stream
            The stream to wait for.

        Raises
        ------
        LengthsUnknown
            The device holds a length that is not from 0 to S, because a committed tensor exceeded its ``max_increment``.
        CaptureError
            The stream is capturing.
        """
        self._check_open()
        self._lengths.sync_lengths(stream=stream)

    def set_active_batch_size(self, new_active_batch_size: int, *, stream: Any) -> None:
        """Keep the first slots, or add slots of length 0 with zeroed states.

        Parameters
        ----------
        new_active_batch_size : int
            Active slots from now on, ``0 <= n <= B``.
        stream : cuda.core.Stream
            The writes are ordered on it.

        Raises
        ------
        RangeError
            ``new_active_batch_size`` is not from 0 to B.
        CaptureError
            The stream is capturing, and slots are added.
        CapacityError
            A sequence of a ``SequenceCacheManager`` waits in a slot that becomes active, and cannot move to another place.

        Notes
        -----
        ``setActiveBatchSize`` of ``LinearKVCache`` and ``HybridCacheManager``. In C++ added slots have the lengths that they last had.
        """
        self._check_open()
        self._lengths.set_active_batch_size(new_active_batch_size, stream=stream)

    def clear_slot(self, slot: int, *, stream: Any) -> None:
        """Set the length of an active slot to 0 and its states to zero. Its K and V stay, and are never read as data again.

        Parameters
        ----------
        slot : int
            An active slot.
        stream : cuda.core.Stream
            The writes are ordered on it.

        Raises
        ------
        SlotError
            The slot is not active.
        CaptureError
            The stream is capturing.
        """
        self._check_open()
        self._lengths.clear_slot(slot, stream=stream)

    def rewind(self, slot: int, length: int, *, stream: Any) -> None:
        """Shorten an active slot to its first ``length`` tokens.

        Parameters
        ----------
        slot : int
            An active slot.
        length : int
            Tokens to keep, at most the present length.
        stream : cuda.core.Stream
            The write is ordered on it.

        Raises
        ------
        ConfigError
            The slots hold recurrent states, which cannot go back to an earlier token.
        SlotError, RangeError
            The slot is not active, or holds fewer tokens.
        LengthsUnknown
            Only the device knows the length of the slot.
        CaptureError
            The stream is capturing.
        """
        self._check_open()
        self._lengths.rewind(slot, length, stream=stream)

    def compact_batch(
        self, batch_mapping: Sequence[int] | np.ndarray[Any, Any] | DeviceTensor, old_batch: int, new_batch: int, *, stream: Any
    ) -> None:
        """Move the kept slots to the front after batch eviction: K and V of all layers, current states and lengths.

        Only live prefixes of K and V are moved. Afterwards the active batch size is ``new_batch``.

        Parameters
        ----------
        batch_mapping : sequence of int, NumPy integer array (old_batch,), or DeviceTensor (old_batch,) int32
            New slot of each old slot, or -1 to drop it. On the host any permutation. On the device it must keep the order of the
            slots, which is checked only if the environment has ``TRT_KVCACHE_DEBUG=1``; the host then knows no length exactly.
        old_batch, new_batch : int
            Active slots before and after; ``old_batch`` is the active batch size, ``0 <= new_batch <= old_batch``.
        stream : cuda.core.Stream or GraphBuilder
            The moves are ordered on it, one launch per head-dim group or kind of state. With a device mapping they can be captured
            in a CUDA graph; call ``lengths.replayed_compaction`` before each replay.

        Raises
        ------
        MappingError
            ``old_batch`` is not the active batch size, entries are missing, out of range or doubled, or the survivors do not fill
            ``0..new_batch-1``.
        RangeError, ShapeError, DTypeError, PlaceError
            An argument does not fit.
        CaptureError
            The stream is capturing, and the mapping is on the host.

        Notes
        -----
        ``HybridCacheManager::compactBatch``, for every manager. Addresses do not change. Caches that share their lengths are compacted
        together.
        """
        self._check_open()
        self._lengths.compact(batch_mapping, old_batch, new_batch, stream=stream)

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
            allocation. With ``scales="token"`` the scales of each layer follow, ``[2, H_i, n']`` float32, with n' the smallest multiple
            of 4 from n on. Static scales are not saved: they are part of the configuration.

        Raises
        ------
        SlotError, RangeError
            There is no such slot, or ``sequence_length`` is not from 0 to S.
        CapacityError
            The memory has no room for the copy.
        CaptureError
            The stream is capturing.

        Notes
        -----
        ``captureKVCache`` of ``HybridCacheManager``.
        """
        self._check_open()
        index = slot_index(slot, self.max_batch_size)
        number = int_in_range("sequence_length", sequence_length, 0, self._lengths.max_sequence_length)
        refuse_capture(self._memory, "capture_kv_cache", stream)
        return [] if self._kv is None else self._kv.capture(index, number, stream=stream).tensors

    def restore_kv_cache(self, saved: Sequence[DeviceTensor], slot: int, *, stream: Any) -> None:
        """Copy captured tokens to the front of a slot. Lengths stay as they are.

        Parameters
        ----------
        saved : sequence of DeviceTensor ``[2, H_i, n, D_i]``
            Tensors of ``capture_kv_cache``, of this cache or of one with equal layers and dtype in the same memory; its layout
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
        ``restoreKVCache`` of ``HybridCacheManager``.
        """
        self._check_open()
        index = slot_index(slot, self.max_batch_size)
        refuse_capture(self._memory, "restore_kv_cache", stream)
        if self._kv is not None:
            self._kv.restore_tensors(saved, index, stream=stream)
        elif saved:
            raise ShapeError(f"saved: expected no tensor, as there is no attention layer, got {len(saved)}.")

    @property
    def parity(self) -> int:
        """Index of the current buffer of states, 0 or 1; always 0 without ``ping_pong``."""
        return 0 if self._states is None else self._states.parity

    def swap(self) -> None:
        """Make the next states current, after an enqueue over *all* active slots. Without ``ping_pong`` nothing changes.

        The host swaps two addresses; nothing is ordered on a stream.
        """
        self._check_open()
        if self._states is not None:
            self._states.swap()

    def copy_back(self, slot: int, count: int, *, stream: Any) -> None:
        """Make the next states of some active slots current, after an enqueue over these slots alone.

        Parameters
        ----------
        slot : int
            The first of the slots.
        count : int
            Number of slots, from ``slot`` on. All of them are active.
        stream : cuda.core.Stream or GraphBuilder
            The copies are ordered on it, one launch per kind; the call neither waits nor allocates, and can be captured. Without
            ``ping_pong`` nothing is copied.

        Raises
        ------
        SlotError, RangeError
            The slots are not all active.
        """
        self._check_open()
        first = slot_index(slot, self.active_batch_size, of="active slots")
        number = int_in_range("count", count, 0)
        if first + number > self.active_batch_size:
            raise RangeError(f"count: expected at most {self.active_batch_size - first} active slots from slot {first} on, got {number}.")
        self._memory.check_stream(stream)
        if self._states is not None:
            self._states.copy_back(first, number, stream=stream)

    def keep_states(self, slot: int, *, stream: Any) -> None:
        """Copy the current states of a slot that leaves the active batch to the next ones, so that :meth:`swap` does not lose them.

        Parameters
        ----------
        slot : int
            Any slot, active or not.
        stream : cuda.core.Stream
            The copies are ordered on it, one launch per kind; the call neither waits nor allocates. Without ``ping_pong`` nothing
            is copied.

        Raises
        ------
        SlotError
            There is no such slot.
        CaptureError
            The stream is capturing.
        """
        self._check_open()
        index = slot_index(slot, self.max_batch_size)
        refuse_capture(self._memory, "keep_states", stream, because="a graph keeps nothing until it is replayed")
        if self._states is not None:
            self._states.keep(index, stream=stream)

    def clear_mamba_states(self, *, stream: Any) -> None:
        """Zero the current states of all layers and slots, as after a warm-up. Lengths stay as they are.

        Parameters
        ----------
        stream : cuda.core.Stream or GraphBuilder
            The writes are ordered on it; the call neither waits nor allocates.

        Notes
        -----
        ``clearMambaStates`` of ``LinearKVCache``.
        """
        self._check_open()
        self._memory.check_stream(stream)
        if self._states is not None:
            self._states.clear(stream=stream)

    def capture_recurrent_states(self, slot: int, *, stream: Any) -> list[DeviceTensor]:
        """Copy the current recurrent states of a slot into new tensors. This allocates.

        Parameters
        ----------
        slot : int
            Any slot, active or not.
        stream : cuda.core.Stream
            The copies are ordered on it, in one launch; the call does not wait.

        Returns
        -------
        list of DeviceTensor ``[num_heads, head_dim, state_size]``
            One per recurrent layer, contiguous. They share one allocation. Empty if the layers keep a conv state only.

        Raises
        ------
        SlotError
            There is no such slot.
        CapacityError
            The memory has no room for the copy.
        CaptureError
            The stream is capturing.

        Notes
        -----
        ``captureRecurrentStates`` of ``HybridCacheManager``, ``captureSSMStates`` of ``LinearKVCache``.
        """
        return self._capture(StateKind.RECURRENT, slot, stream)

    def capture_conv_states(self, slot: int, *, stream: Any) -> list[DeviceTensor]:
        """Copy the current conv states of a slot into new tensors. This allocates.

        Parameters
        ----------
        slot : int
            Any slot, active or not.
        stream : cuda.core.Stream
            The copies are ordered on it, in one launch; the call does not wait.

        Returns
        -------
        list of DeviceTensor ``[conv_dim, conv_kernel]``
            One per recurrent layer, contiguous. They share one allocation.

        Raises
        ------
        SlotError
            There is no such slot.
        CapacityError
            The memory has no room for the copy.
        CaptureError
            The stream is capturing.

        Notes
        -----
        ``captureConvStates`` of ``LinearKVCache`` and ``HybridCacheManager``.
        """
        return self._capture(StateKind.CONV, slot, stream)

    def restore_recurrent_states(self, saved: Sequence[DeviceTensor], slot: int, *, stream: Any) -> None:
        """Copy captured recurrent states into the current ones of a slot. Lengths stay as they are.

        Parameters
        ----------
        saved : sequence of DeviceTensor ``[num_heads, head_dim, state_size]``
            Tensors of ``capture_recurrent_states``. The tensors must stay open until the copies are done.
        slot : int
            Any slot, active or not.
        stream : cuda.core.Stream
            The copies are ordered on it, in one launch; the call neither waits nor allocates.

        Raises
        ------
        SlotError
            There is no such slot.
        ShapeError, DTypeError, PlaceError, LayoutError, ClosedError
            The tensors do not fit the layers, are not contiguous, or are closed.
        CaptureError
            The stream is capturing.
        """
        self._restore(StateKind.RECURRENT, saved, slot, stream)

    def restore_conv_states(self, saved: Sequence[DeviceTensor], slot: int, *, stream: Any) -> None:
        """Copy captured conv states into the current ones of a slot. Lengths stay as they are.

        Parameters
        ----------
        saved : sequence of DeviceTensor ``[conv_dim, conv_kernel]``
            Tensors of ``capture_conv_states``. The tensors must stay open until the copies are done.
        slot : int
            Any slot, active or not.
        stream : cuda.core.Stream
            The copies are ordered on it, in one launch; the call neither waits nor allocates.

        Raises
        ------
        SlotError
            There is no such slot.
        ShapeError, DTypeError, PlaceError, LayoutError, ClosedError
            The tensors do not fit the layers, are not contiguous, or are closed.
        CaptureError
            The stream is capturing.
        """
        self._restore(StateKind.CONV, saved, slot, stream)

    def _capture(self, kind: StateKind, slot: int, stream: Any) -> list[DeviceTensor]:
        self._check_open()
        index = slot_index(slot, self.max_batch_size)
        refuse_capture(self._memory, f"capture_{kind.value}_states", stream)
        return [] if self._states is None else self._states.capture(kind, index, stream=stream)

    def _restore(self, kind: StateKind, saved: Sequence[DeviceTensor], slot: int, stream: Any) -> None:
        self._check_open()
        index = slot_index(slot, self.max_batch_size)
        refuse_capture(self._memory, f"restore_{kind.value}_states", stream)
        if self._states is not None:
            self._states.restore_tensors(kind, saved, index, stream=stream)
        elif saved:
            raise ShapeError(f"saved: expected no tensor, as there is no recurrent layer, got {len(saved)}.")

    def close(self) -> None:
        """Release the memory. Closing again does nothing.

        Views raise :class:`~trt_kvcache.errors.ClosedError` from now on; DLPack consumers keep the memory alive.
        """
        super().close()

    def _release(self) -> None:
        while self._own_contents:
            self._lengths.detach(self._own_contents.pop())
        self._resources.close()


def _check_shared(lengths: Lengths, max_batch_size: int, max_sequence_length: int | None, memory: Memory) -> None:
    """Check lengths that a cache is to share. States fit any ``max_sequence_length``: then None is expected of it."""
    if not isinstance(lengths, Lengths):
        raise ConfigError(f"lengths: expected the Lengths of another cache, got {short_repr(lengths)}.")
    limit = lengths.max_sequence_length if max_sequence_length is None else max_sequence_length
    if (lengths.max_batch_size, lengths.max_sequence_length) != (max_batch_size, limit):
        raise ConfigError(
            f"lengths: expected {max_batch_size} slots of {limit} tokens, got "
            f"{lengths.max_batch_size} slots of {lengths.max_sequence_length}."
        )
    if lengths.memory is not memory:
        raise PlaceError(f"lengths: expected lengths in the memory of the cache, got lengths in another one ({lengths.memory.device}).")
