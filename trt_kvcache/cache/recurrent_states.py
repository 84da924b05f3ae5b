"""``RecurrentStates``: the recurrent and conv states of all recurrent layers, in one buffer of each kind, or two of each."""

from collections.abc import Sequence
from enum import Enum
from typing import Any

from trt_kvcache.cache.config import MambaCacheConfig
from trt_kvcache.cache.layout import StateStorage
from trt_kvcache.cache.resources import Resources
from trt_kvcache.kernels import AnyCompactionPlan, StateInfos
from trt_kvcache.kernels.state_row_kernels import (
    compact_rows_kernel,
    copy_rows_kernel,
    instantiate_rows_kernel,
    save_rows_kernel,
    zero_rows_kernel,
)
from trt_kvcache.memory.base import Array
from trt_kvcache.memory.saved_tensors import allocate_tensors, check_saved
from trt_kvcache.memory.tensor import DeviceTensor


class StateKind(Enum):
    """The two states of a recurrent layer. A short convolution has no recurrent one."""

    RECURRENT = "recurrent"
    CONV = "conv"


def state_storages(config: MambaCacheConfig) -> dict[StateKind, StateStorage]:
    """Return shapes and sizes of the states of each kind that the layers have: recurrent states first."""
    storages = {StateKind.RECURRENT: config.recurrent_storage, StateKind.CONV: config.conv_storage}
    return {kind: storage for kind, storage in storages.items() if storage is not None}


class StateBuffer:
    """One buffer of one kind: a contiguous tensor ``[B, ...]`` per recurrent layer, all in one allocation."""

    def __init__(self, storage: StateStorage, resources: Resources, *, stream: Any) -> None:
        allocation = resources.allocate(storage.nbytes, stream=stream)
        self._whole = DeviceTensor(allocation, shape=(storage.nbytes,), dtype="uint8")
        #: The states of each layer.
        self.layers = tuple(
            DeviceTensor(allocation, shape=storage.shape, dtype=storage.dtype, offset=index * storage.layer_nbytes)
            for index in range(storage.num_layers)
        )
        #: Addresses of the layers, for kernels.
        self.infos = resources.add(StateInfos(self.layers, stream=stream))

    def zero(self, *, stream: Any) -> None:
        """Zero the states of all slots."""
        self._whole.memory.zero(self._whole, stream=stream)


class RecurrentStates:
    """States of all recurrent layers, one of the :class:`~trt_kvcache.cache.slot_contents.SlotContents` of a cache."""

    # With ping_pong there are two buffers. `parity` (0 or 1) is the index of the current one, which the next enqueue reads; everything acts
    # on it unless it says otherwise. Callers have checked slots and streams.

    is_recurrent = True

    def __init__(self, config: MambaCacheConfig, resources: Resources, *, stream: Any) -> None:
        self._memory = resources.memory
        self._storages = state_storages(config)
        self._buffers = {
            kind: [StateBuffer(storage, resources, stream=stream) for _ in range(config.num_buffers)]
            for kind, storage in self._storages.items()
        }
        self._num_buffers = config.num_buffers
        #: The layers.
        self.config = config
        #: Recurrent layers.
        self.num_layers = config.num_layers
        #: Index of the current buffer.
        self.parity = 0

    @property
    def kinds(self) -> tuple[StateKind, ...]:
        """The kinds of states that the layers have."""
        return tuple(self._storages)

    def current(self, kind: StateKind) -> StateBuffer:
        """Return the states that the next enqueue reads."""
        return self._buffers[kind][self.parity]

    def next(self, kind: StateKind) -> StateBuffer:
        """Return the states that the next enqueue writes; without ``ping_pong`` they are the current ones."""
        return self._buffers[kind][self._next_parity]

    @property
    def _next_parity(self) -> int:
        return (self.parity + 1) % self._num_buffers

    def swap(self) -> None:
        """Make the next states current. With one buffer nothing changes."""
        self.parity = self._next_parity

    def copy_back(self, slot: int, count: int, *, stream: Any) -> None:
        """Copy the states of ``count`` slots from ``slot`` on from next to current, in one launch per kind."""
        if self._num_buffers > 1:
            for kind in self.kinds:
                copy_rows_kernel(self.current(kind).infos, self.next(kind).infos, slot, count, stream)

    def clear(self, *, stream: Any) -> None:
        """Zero the current states of all slots."""
        for kind in self.kinds:
            self.current(kind).zero(stream=stream)

    def resize(self, lengths: Sequence[int], *, stream: Any) -> None:
        """Do nothing: states stay where they are. The owner of a slot that leaves may call :meth:`keep` first."""

    def keep(self, slot: int, *, stream: Any) -> None:
        """Copy the current states of a slot to the next ones, in one launch per kind."""
        if self._num_buffers > 1:
            for kind in self.kinds:
                copy_rows_kernel(self.next(kind).infos, self.current(kind).infos, slot, 1, stream)

    def reset_slots(self, slots: Sequence[int], *, stream: Any) -> None:
        """Zero the current states of some slots, in one launch per kind and range of adjacent slots."""
        for kind in self.kinds:
            for slot, count in _ranges(slots):
                zero_rows_kernel(self.current(kind).infos, slot, count, stream)

    def compact(self, plan: AnyCompactionPlan, *, stream: Any) -> None:
        """Move the current states of slots, in one launch per kind."""
        for kind in self.kinds:
            compact_rows_kernel(self.current(kind).infos, plan, stream)

    # --- copies within the memory of the cache: one launch per kind ---

    def capture(self, kind: StateKind, slot: int, *, stream: Any) -> list[DeviceTensor]:
        """Copy the current states of a slot into new tensors, one per layer. A kind that the layers do not have has none."""
        saved = self.allocate_saved(kind, stream=stream)
        if saved:
            save_rows_kernel(self.current(kind).infos, saved, slot, stream)
        return saved

    def allocate_saved(self, kind: StateKind, *, stream: Any) -> list[DeviceTensor]:
        """Allocate the tensors of :meth:`capture`, together. Their bytes are not set."""
        storage = self._storages.get(kind)
        return [] if storage is None else allocate_tensors(self._memory, _saved_shapes(storage), storage.dtype, stream=stream)

    def restore(self, kind: StateKind, saved: Sequence[DeviceTensor], slot: int, *, stream: Any) -> None:
        """Copy captured states into the current ones of a slot."""
        instantiate_rows_kernel(self.current(kind).infos, saved, slot, stream)

    def restore_tensors(self, kind: StateKind, tensors: Sequence[DeviceTensor], slot: int, *, stream: Any) -> None:
        """Check tensors that a user gave, then copy them into the current states of a slot. A kind that is not there takes none."""
        storage = self._storages.get(kind)
        if storage is None:
            check_saved(tensors, [], "", self._memory, per=f"{kind.value} state")
            return
        check_saved(tensors, _saved_shapes(storage), storage.dtype, self._memory, per="recurrent layer")
        self.restore(kind, tensors, slot, stream=stream)

    # --- direct copies to and from the host: one for each state, without a kernel and without memory on the device ---
    #
    # Host arrays are ``[1, ...]``: the recurrent states of all layers, then their conv states. They must stay until the stream was waited
    # for.

    def download(self, arrays: Sequence[Array], slot: int, *, stream: Any) -> None:
        """Copy the current states of a slot to host arrays."""
        for array, tensor in zip(arrays, self._slot_views(slot, self.parity), strict=True):
            self._memory.download(array, tensor, stream=stream)

    def upload(self, arrays: Sequence[Array], slot: int, *, both_buffers: bool, stream: Any) -> None:
        """Copy host arrays into the current states of a slot, or into both buffers."""
        # A sequence in a slot that no enqueue writes needs both: its states stay current however often the buffers are swapped.
        for parity in {self.parity, self._next_parity} if both_buffers else {self.parity}:
            for array, tensor in zip(arrays, self._slot_views(slot, parity), strict=True):
                self._memory.upload(tensor, array, stream=stream)

    def _slot_views(self, slot: int, parity: int) -> list[DeviceTensor]:
        return [layer[slot : slot + 1] for buffers in self._buffers.values() for layer in buffers[parity].layers]


def _saved_shapes(storage: StateStorage) -> list[tuple[int, ...]]:
    return [storage.slot_shape] * storage.num_layers


def _ranges(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Return the ranges of adjacent slots as pairs (first slot, number of slots)."""
    ranges: list[tuple[int, int]] = []
    for slot in slots:
        if ranges and sum(ranges[-1]) == slot:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + 1)
        else:
            ranges.append((slot, 1))
    return ranges
