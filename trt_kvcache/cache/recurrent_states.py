"""``RecurrentStates``: the recurrent and conv states of all recurrent layers, in one buffer of each kind, or in two."""

from collections.abc import Sequence
from enum import Enum
from typing import Any

from trt_kvcache.cache.config import MambaCacheConfig
from trt_kvcache.cache.layout import StateStorage
from trt_kvcache.cache.resources import Resources
from trt_kvcache.kernels import AnyCompactionPlan, StateInfos, compact_rows, copy_rows, instantiate_rows, save_rows, zero_rows
from trt_kvcache.memory.saved_tensors import allocate_tensors, check_saved
from trt_kvcache.memory.tensor import DeviceTensor


class StateKind(Enum):
    """The two states that a Mamba layer keeps. A short convolution has no recurrent one."""

    RECURRENT = "recurrent"
    CONV = "conv"


def state_storages(config: MambaCacheConfig) -> dict[StateKind, StateStorage]:
    """Return where the states of each kind lie, of the kinds that the layers have: recurrent states first."""
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
        #: What the kernels take.
        self.infos = resources.add(StateInfos(self.layers, stream=stream))

    def zero(self, *, stream: Any) -> None:
        """Zero the states of all slots."""
        self._whole.memory.zero(self._whole, stream=stream)


class RecurrentStates:
    """States of all recurrent layers, one part of a cache: :class:`~trt_kvcache.cache.slot_contents.SlotContents`."""

    is_recurrent = True

    def __init__(self, config: MambaCacheConfig, resources: Resources, *, stream: Any) -> None:
        self._memory = resources.memory
        self._storages = state_storages(config)
        self._buffers = {
            kind: [StateBuffer(storage, resources, stream=stream) for _ in range(config.num_buffers)]
            for kind, storage in self._storages.items()
        }
        self._num_buffers = config.num_buffers
        #: The layers whose states these are.
        self.config = config
        #: Recurrent layers.
        self.num_layers = config.num_layers
        #: Which buffer is current.
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
                copy_rows(self.current(kind).infos, self.next(kind).infos, slot, count=count, stream=stream)

    def clear(self, *, stream: Any) -> None:
        """Zero the current states of all slots."""
        for kind in self.kinds:
            self.current(kind).zero(stream=stream)

    def resize(self, lengths: Sequence[int], *, stream: Any) -> None:
        """Do nothing: states stay where they are. The owner of a slot that leaves may call :meth:`keep` before."""

    def keep(self, slot: int, *, stream: Any) -> None:
        """Copy the current states of a slot to the next ones, in one launch per kind."""
        if self._num_buffers > 1:
            for kind in self.kinds:
                copy_rows(self.next(kind).infos, self.current(kind).infos, slot, stream=stream)

    def reset_slots(self, slots: Sequence[int], *, stream: Any) -> None:
        """Zero the current states of some slots, in one launch per kind and run of adjacent slots."""
        for kind in self.kinds:
            for slot, count in _runs(slots):
                zero_rows(self.current(kind).infos, slot, count=count, stream=stream)

    def compact(self, plan: AnyCompactionPlan, *, stream: Any) -> None:
        """Move the current states of slots, in one launch per kind."""
        for kind in self.kinds:
            compact_rows(self.current(kind).infos, plan, stream=stream)

    def capture(self, kind: StateKind, slot: int, *, stream: Any) -> list[DeviceTensor]:
        """Copy the current states of a slot into new tensors ``[...]``, one per layer, in one launch; none of a kind that is not there."""
        if kind not in self._storages:
            return []
        storage = self._storages[kind]
        saved = allocate_tensors(self._memory, _saved_shapes(storage), storage.dtype, stream=stream)
        save_rows(self.current(kind).infos, saved, slot, stream=stream)
        return saved

    def restore(self, kind: StateKind, saved: Sequence[DeviceTensor], slot: int, *, stream: Any) -> None:
        """Check captured states, then copy them into the current ones of a slot, in one launch; no tensors of a kind that is not there."""
        storage = self._storages.get(kind)
        if storage is None:
            check_saved(saved, [], "", self._memory, per=f"{kind.value} state")
            return
        check_saved(saved, _saved_shapes(storage), storage.dtype, self._memory, per="recurrent layer")
        instantiate_rows(self.current(kind).infos, saved, slot, stream=stream)


def _saved_shapes(storage: StateStorage) -> list[tuple[int, ...]]:
    return [storage.slot_shape] * storage.num_layers


def _runs(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Return the runs of adjacent slots as pairs (first slot, number of slots)."""
    runs: list[tuple[int, int]] = []
    for slot in slots:
        if runs and sum(runs[-1]) == slot:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((slot, 1))
    return runs
