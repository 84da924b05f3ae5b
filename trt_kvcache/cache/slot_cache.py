"""``SlotCache``: what all managers share. Lengths, the active batch, compaction, and the life of their memory."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from trt_kvcache._util.lifetime import Uncopyable
from trt_kvcache.cache.config import KVCacheConfig
from trt_kvcache.cache.kv_head_dim_group import KVHeadDimGroup
from trt_kvcache.cache.lengths import Lengths
from trt_kvcache.cache.mamba_config import MambaCacheConfig
from trt_kvcache.cache.recurrent_states import RecurrentStates
from trt_kvcache.cache.slot_contents import SlotContents
from trt_kvcache.errors import ClosedError, ConfigError, PlaceError
from trt_kvcache.memory.base import Allocation, Memory
from trt_kvcache.memory.tensor import DeviceTensor


class _Closable(Protocol):
    def close(self) -> None: ...


_Owned = TypeVar("_Owned", bound=_Closable)
_Self = TypeVar("_Self", bound="Closable")


class Closable(Uncopyable, ABC):
    """What is used until it is closed, or until the cache that it is over is; a context manager."""

    _closed: bool
    _cache: Any = None

    @abstractmethod
    def close(self) -> None:
        """Let go of what it holds. Idempotent."""

    def _check_open(self) -> None:
        if self._closed or (self._cache is not None and self._cache.closed):
            whose = type(self).__name__ + ("" if self._closed else "'s cache")
            raise ClosedError(f"this {whose} is closed.")

    def __enter__(self: _Self) -> _Self:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SlotCache(Closable):
    """Slots that hold something, and how many tokens each holds. Not thread-safe.

    All memory is allocated, as zeros, by the constructor, which waits for that. Addresses never change.

    ``stream`` is a cuda.core.Stream: work is ordered on it, and calls neither wait nor allocate, unless it is said. A ``slot`` is
    ``0 <= slot < B``, active or not, unless it is said. Wrong arguments, capturing streams and
    closed objects raise as :mod:`trt_kvcache.errors` says.

    Raises CapacityError: an allocation failed; those made before were released. ConfigError or PlaceError: ``lengths`` have other sizes, or
    live elsewhere.

    Parameters
    ----------
    max_batch_size, max_sequence_length
        B and S of the lengths that it makes.
    memory
        Where it lives: ``HostMemory`` or ``CudaMemory``.
    lengths
        Shared lengths; without, it makes its own.
    """

    def __init__(self, max_batch_size: int, max_sequence_length: int, *, memory: Memory, lengths: Lengths | None = None) -> None:
        if lengths is not None:
            self._check_shared(lengths, max_batch_size, max_sequence_length)
            if lengths.memory is not memory:
                raise PlaceError(
                    f"lengths: expected those of the memory that the cache is in, got another one's ({lengths.memory.device})."
                )
        self._memory = memory
        self._closed = False
        self._owned: list[_Closable] = []
        self._contents: list[SlotContents] = []
        try:
            self._lengths = self._own(Lengths(max_batch_size, max_sequence_length, memory=memory)) if lengths is None else lengths
            stream = memory.create_stream()
            self._allocate_contents(stream)
            memory.synchronize(stream)
        except BaseException:
            self._release()
            raise
        for contents in self._contents:
            self._lengths.attach(contents)

    def _check_shared(self, lengths: Lengths, max_batch_size: int, max_sequence_length: int) -> None:
        if (lengths.max_batch_size, lengths.max_sequence_length) != (max_batch_size, max_sequence_length):
            raise ConfigError(
                f"lengths: expected those of {max_batch_size} slots of {max_sequence_length} tokens, got "
                f"{lengths.max_batch_size} slots of {lengths.max_sequence_length}."
            )

    @abstractmethod
    def _allocate_contents(self, stream: Any) -> None:
        """Allocate what the slots hold, and add what follows the lengths to ``_contents``."""

    def _own(self, part: _Owned) -> _Owned:
        self._owned.append(part)
        return part

    def _allocate(self, nbytes: int, stream: Any) -> Allocation:
        return self._own(self._memory.allocate(nbytes, zeroed=True, stream=stream))

    @property
    def memory(self) -> Memory:
        """Where the cache lives."""
        return self._memory

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    @property
    def lengths(self) -> Lengths:
        """Device lengths, host mirror and active batch size."""
        return self._lengths

    @property
    def kv_config(self) -> KVCacheConfig | None:
        """The attention layers, in their order; None without any."""
        return None

    @property
    def kv_head_dim_groups(self) -> tuple[KVHeadDimGroup, ...]:
        """The attention layers by head dim, as kernels take them; empty without any."""
        return ()

    @property
    def mamba_config(self) -> MambaCacheConfig | None:
        """The recurrent layers, in their order; None without any."""
        return None

    @property
    def states(self) -> RecurrentStates | None:
        """The states of the recurrent layers; None without any."""
        return None

    @property
    def max_batch_size(self) -> int:
        """Slots, B."""
        return self._lengths.max_batch_size

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
        """Start anew with ``n = len(reuse_lengths)`` active slots.

        K and V are not cleared. States of slots of length 0 are zeroed; those of other slots must have been restored before.

        ``resetForNewSequences`` of seeds 001 and 003.

        Parameters
        ----------
        reuse_lengths : sequence of int, or NumPy integer array (n,)
            Tokens that each slot already holds, ``0 <= length <= S``; ``0 <= n <= B``.
        """
        self._check_open()
        self._lengths.reset(reuse_lengths, stream=stream)

    def commit_sequence_length(
        self, increment: int | Sequence[int] | np.ndarray[Any, Any] | DeviceTensor, *, max_increment: int | None = None, stream: Any
    ) -> None:
        """Count tokens that an enqueue has written: lengths += increment.

        ``commitSequenceLength`` of seeds 001 and 003.

        Raises CapacityError: a slot would exceed ``max_sequence_length``.

        Parameters
        ----------
        increment : int, sequence of int (A,), or DeviceTensor (A,) int32
            A number counts for all active slots. A prefix that was reused is not counted again.
        max_increment : int
            Only, and always, with a device tensor: none of its values exceeds this.
        stream : cuda.core.Stream or GraphBuilder
            A number and a device tensor can be captured in a CUDA graph; then the host mirror stays, and whoever replays calls
            ``lengths.replayed``.
        """
        self._check_open()
        self._lengths.commit(increment, max_increment=max_increment, stream=stream)

    def sync_lengths(self, *, stream: Any) -> None:
        """Read the lengths from the device, after which the host knows them exactly. Waits for ``stream``."""
        self._check_open()
        self._lengths.sync_lengths(stream=stream)

    def set_active_batch_size(self, new_active_batch_size: int, *, stream: Any) -> None:
        """Keep the first ``n`` slots, or add slots of length 0 and zeroed states. ``0 <= n <= B``.

        ``setActiveBatchSize`` of seeds 001 and 003; slots that are added come empty.
        """
        self._check_open()
        self._lengths.set_active_batch_size(new_active_batch_size, stream=stream)

    def clear_slot(self, slot: int, *, stream: Any) -> None:
        """Set the length of an active slot to 0 and its states to zero. Its K and V stay, and are never read as data again."""
        self._check_open()
        self._lengths.clear_slot(slot, stream=stream)

    def rewind(self, slot: int, length: int, *, stream: Any) -> None:
        """Shorten an active slot to its first ``length`` tokens.

        Raises ConfigError: the slots hold recurrent states, which cannot be rewound. LengthsUnknown.
        """
        self._check_open()
        self._lengths.rewind(slot, length, stream=stream)

    def compact_batch(
        self, batch_mapping: Sequence[int] | np.ndarray[Any, Any] | DeviceTensor, old_batch: int, new_batch: int, *, stream: Any
    ) -> None:
        """Move the kept slots to the front after batch eviction: K and V of all layers, current states and lengths.

        Only live prefixes of K and V are moved. Afterwards the active batch size is ``new_batch``.

        ``HybridCacheManager::compactBatch`` (seed 003), for every manager. Addresses do not change. Managers that share their
        lengths are compacted together.

        Raises MappingError: ``old_batch`` is not the active batch size, entries are out of range or doubled, or the survivors do not fill
        ``0..new_batch-1``.

        Parameters
        ----------
        batch_mapping : sequence of int, NumPy integer array (old_batch,), or DeviceTensor (old_batch,) int32
            New slot of each old slot, or -1 to drop it. On the host any permutation. On the device it must keep the order of the
            slots, which is checked only where the environment has ``TRT_KVCACHE_DEBUG=1``; the host then knows no length exactly.
        old_batch, new_batch
            Live slots before and after; ``old_batch`` is the active batch size, ``0 <= new_batch <= old_batch``.
        stream : cuda.core.Stream or GraphBuilder
            The moves are ordered on it, one launch per head-dim group or kind of state; the call neither waits nor allocates. With
            a device mapping it can be captured in a CUDA graph; then whoever replays calls ``lengths.replayed_compaction``.
        """
        self._check_open()
        self._lengths.compact(batch_mapping, old_batch, new_batch, stream=stream)

    def close(self) -> None:
        """Release the memory. Idempotent. Views raise :class:`ClosedError` from now on; DLPack consumers keep theirs."""
        self._closed = True
        self._release()

    def _release(self) -> None:
        while self._contents:
            self._lengths.detach(self._contents.pop())
        while self._owned:
            self._owned.pop().close()
