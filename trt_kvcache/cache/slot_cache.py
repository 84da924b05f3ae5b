"""``SlotCache``: what all managers have in common. Lengths, the active batch, compaction, and the life of their memory."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from trt_kvcache._util.checks import slot_index
from trt_kvcache._util.lifetime import Closable
from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.cache.config import KVCacheConfig
from trt_kvcache.cache.kv_head_dim_group import KVHeadDimGroup
from trt_kvcache.cache.lengths import Lengths
from trt_kvcache.cache.mamba_config import MambaCacheConfig
from trt_kvcache.cache.recurrent_states import RecurrentStates
from trt_kvcache.cache.resources import Resources
from trt_kvcache.cache.slot_contents import SlotContents
from trt_kvcache.errors import ConfigError, PlaceError
from trt_kvcache.kernels import KVLayerInfos
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.shapes import MAX_DIMENSION
from trt_kvcache.memory.tensor import DeviceTensor


class SlotCache(Closable):
    """Slots that hold tokens or states, and how many tokens each slot holds. The base of all managers. Not thread-safe.

    All memory is allocated, as zeros, by the constructor, which waits for that. Addresses never change.

    Parameters
    ----------
    max_batch_size : int
        Slots, B, of the lengths that it makes.
    max_sequence_length : int
        Tokens that a slot can hold, S.
    memory : Memory
        Where it lives: ``HostMemory`` or ``CudaMemory``.
    lengths : Lengths, optional
        Lengths that are shared with other managers. Without, it makes and owns its own.

    Raises
    ------
    ConfigError, PlaceError
        ``memory`` is not a memory; or ``lengths`` are not lengths, have other sizes, or are in another memory.
    CapacityError
        An allocation failed. Those made before were released.

    Notes
    -----
    Methods that take a ``stream`` are ordered on it and neither wait nor allocate, unless they say so. A ``slot`` is any of the B
    slots, active or not, unless a method says otherwise. Besides the errors that a method names, all raise
    :class:`~trt_kvcache.errors.PlaceError` for a stream of another memory and :class:`~trt_kvcache.errors.ClosedError` once the
    cache is closed. If a method raises, nothing was changed.

    The operations on slots act on :attr:`lengths`, and through them on every manager that shares these.
    """

    def __init__(self, max_batch_size: int, max_sequence_length: int, *, memory: Memory, lengths: Lengths | None = None) -> None:
        super().__init__()
        if lengths is not None:
            _check_shared(lengths, max_batch_size, max_sequence_length, memory)
        self._memory = memory
        self._resources = Resources(memory)
        self._contents: list[SlotContents] = []
        self._lengths = self._resources.add(Lengths(max_batch_size, max_sequence_length, memory=memory)) if lengths is None else lengths

    @contextmanager
    def _allocating(self) -> Iterator[Any]:
        """Yield the stream on which a constructor allocates the contents of the slots, which then follow the lengths.

        The stream is waited for at the end of the block. If the block raises, everything that was allocated is released.
        """
        try:
            stream = self._memory.create_stream()
            yield stream
            self._memory.synchronize(stream)
        except BaseException:
            self._resources.close()
            raise
        for contents in self._contents:
            self._lengths.attach(contents)

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
    def memory(self) -> Memory:
        """Where the cache lives."""
        return self._memory

    @property
    def lengths(self) -> Lengths:
        """The lengths tensor, the mirror on the host, and the active batch size."""
        return self._lengths

    @property
    def kv_config(self) -> KVCacheConfig | None:
        """The attention layers, in their order; None if the cache has none."""
        return None

    @property
    def kv_head_dim_groups(self) -> tuple[KVHeadDimGroup, ...]:
        """The attention layers by head dim, as kernels take them; empty if the cache has none."""
        return ()

    @property
    def kv_scale_rows(self) -> KVLayerInfos | None:
        """The scales by token of the attention layers, in rows of four tokens, as kernels move them; None without such scales."""
        return None

    @property
    def mamba_config(self) -> MambaCacheConfig | None:
        """The recurrent layers, in their order; None if the cache has none."""
        return None

    @property
    def states(self) -> RecurrentStates | None:
        """The states of the recurrent layers; None if the cache has none."""
        return None

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
        """Whether no active slot holds a token."""
        self._check_open()
        return self._lengths.all_empty

    def reset_for_new_sequences(self, reuse_lengths: Sequence[int] | np.ndarray[Any, Any], *, stream: Any) -> None:
        """Make ``n = len(reuse_lengths)`` slots active for new sequences.

        K and V are not cleared. States of slots of length 0 are zeroed; those of other slots must have been restored before.

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
        ``resetForNewSequences`` of seeds 001 and 003.
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
            Given with a device tensor, and only then: an upper bound of its values, which the host does not know.
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
        ``commitSequenceLength`` of seeds 001 and 003.
        """
        self._check_open()
        self._lengths.commit(increment, max_increment=max_increment, stream=stream)

    def sync_lengths(self, *, stream: Any) -> None:
        """Read the lengths from the device, after which the host knows them exactly. Waits for ``stream``.

        Parameters
        ----------
        stream : cuda.core.Stream
            What is waited for.

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
        ``setActiveBatchSize`` of seeds 001 and 003, where added slots come with the lengths that they last had.
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
            Tokens to keep, at most those that the slot holds.
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

    def keep_states(self, slot: int, *, stream: Any) -> None:
        """Copy the current states of a slot that leaves the active batch to the next ones: a cache without states has nothing to do.

        Parameters
        ----------
        slot : int
            Any slot, active or not.
        stream : cuda.core.Stream
            The copies are ordered on it.
        """
        self._check_open()
        slot_index(slot, self.max_batch_size)
        self._memory.check_stream(stream)

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
        ``HybridCacheManager::compactBatch`` of seed 003, for every manager. Addresses do not change. Managers that share their
        lengths are compacted together.
        """
        self._check_open()
        self._lengths.compact(batch_mapping, old_batch, new_batch, stream=stream)

    def close(self) -> None:
        """Release the memory. Closing again does nothing.

        Views raise :class:`~trt_kvcache.errors.ClosedError` from now on; DLPack consumers keep theirs.
        """
        super().close()

    def _release(self) -> None:
        while self._contents:
            self._lengths.detach(self._contents.pop())
        self._resources.close()


def _check_shared(lengths: Lengths, max_batch_size: int, max_sequence_length: int, memory: Memory) -> None:
    if not isinstance(lengths, Lengths):
        raise ConfigError(f"lengths: expected the Lengths of another cache, got {short_repr(lengths)}.")
    if (lengths.max_batch_size, lengths.max_sequence_length) != (max_batch_size, max_sequence_length):
        raise ConfigError(
            f"lengths: expected those of {max_batch_size} slots of {max_sequence_length} tokens, got "
            f"{lengths.max_batch_size} slots of {lengths.max_sequence_length}."
        )
    if lengths.memory is not memory:
        raise PlaceError(f"lengths: expected those of the memory that the cache is in, got another one's ({lengths.memory.device}).")
