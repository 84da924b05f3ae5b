"""``CompactionPlan``: the moves of slots, checked on the host; ``DeviceCompactionPlan``: a mapping that only the device knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np

from trt_kvcache._util.checks import as_int, int_in_range
from trt_kvcache.errors import DTypeError, MappingError, PlaceError, ShapeError
from trt_kvcache.kernels.compaction_launches import CompactionLaunch, pack_moves, pack_simultaneous_moves
from trt_kvcache.kernels.compaction_moves import MAX_MOVES, MAX_SLOTS, CompactionMove, plan_moves
from trt_kvcache.kernels.layer_views import check_memory
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.shapes import MAX_DIMENSION
from trt_kvcache.memory.tensor import DeviceTensor


def _host_mapping(mapping: Any, old_batch: int, new_batch: int) -> list[int]:
    """Return the mapping as ints; raise :class:`MappingError` if it is not valid."""
    if isinstance(mapping, DeviceTensor):
        raise PlaceError(f"batch_mapping: expected integers on the host, got {mapping!r}.")
    if isinstance(mapping, np.ndarray) and (mapping.dtype.kind not in "iu" or mapping.ndim != 1):
        raise MappingError(f"batch_mapping: expected integers of shape (old_batch,), got {mapping.dtype} {mapping.shape}.")
    if isinstance(mapping, str | bytes) or not isinstance(mapping, Sequence | np.ndarray):
        raise MappingError(f"batch_mapping: expected a sequence of integers, got {type(mapping).__name__}.")
    if len(mapping) != old_batch:
        raise MappingError(f"batch_mapping: expected old_batch={old_batch} entries, got {len(mapping)}.")
    slots = list(mapping)
    if set(map(type, slots)) - {int}:
        slots = [as_int(f"batch_mapping[{old}]", new, error=MappingError) for old, new in enumerate(slots)]
    taken: dict[int, int] = {}
    for old, new in enumerate(slots):
        if not -1 <= new < new_batch:
            raise MappingError(f"batch_mapping[{old}]: expected -1 or a slot below new_batch={new_batch}, got {new}.")
        if new >= 0 and taken.setdefault(new, old) != old:
            raise MappingError(f"batch_mapping: old slots {taken[new]} and {old} both go to slot {new}.")
    if len(taken) != new_batch:
        missing = [new for new in range(new_batch) if new not in taken]
        raise MappingError(f"batch_mapping: expected survivors for all of new_batch={new_batch} slots, got none for {missing}.")
    return slots


@dataclass(frozen=True)
class CompactionPlan:
    """The moves of a compaction. Made by :meth:`from_host`, which checks everything.

    Parameters
    ----------
    old_batch, new_batch : int
        Active slots before and after.
    move_lists : tuple of tuples of CompactionMove
        Carried out in this order, one launch for each list.
    max_tokens : int
        Tokens of the longest slot that moves; 0 if none moves.

    Examples
    --------
    Slot 0 is dropped, slots 1 and 2, of 3 and 4 tokens, move to slots 0 and 1:

    >>> from trt_kvcache.kernels import CompactionPlan
    >>> plan = CompactionPlan.from_host([-1, 0, 1], old_batch=3, new_batch=2, lengths=[5, 3, 4])
    >>> [tuple(move) for move in plan.move_lists[0]]
    [(1, 0, 3), (2, 1, 4)]
    >>> plan.max_tokens
    4
    """

    old_batch: int
    new_batch: int
    move_lists: tuple[tuple[CompactionMove, ...], ...]
    max_tokens: int

    @property
    def is_identity(self) -> bool:
        """True if no slot moves. Slots at the end may still be dropped."""
        return not self.move_lists

    def of_rows(self, tokens_per_row: int) -> CompactionPlan:
        """Return the plan in rows of several tokens, rounded up, instead of tokens.

        Parameters
        ----------
        tokens_per_row : int
            Tokens of a row. With 1 this plan is returned.
        """
        if tokens_per_row == 1:
            return self
        lists = tuple(tuple(move._replace(tokens=-(-move.tokens // tokens_per_row)) for move in moves) for moves in self.move_lists)
        return replace(self, move_lists=lists, max_tokens=-(-self.max_tokens // tokens_per_row))

    @cached_property
    def launches(self) -> tuple[CompactionLaunch, ...]:
        """The launches of this plan, in order."""
        return tuple(map(pack_moves, self.move_lists))

    @cached_property
    def simultaneous_launches(self) -> tuple[CompactionLaunch, ...]:
        """The launches for a kernel that carries out all moves of a launch at once."""
        return tuple(map(pack_simultaneous_moves, self.move_lists))

    @classmethod
    def from_host(cls, mapping: Any, old_batch: int, new_batch: int, lengths: Sequence[int]) -> CompactionPlan:
        """Check a mapping that the host knows, and plan its moves.

        Parameters
        ----------
        mapping : sequence of int, or NumPy integer array (old_batch,)
            New slot of each old slot, or -1 to drop it. Any permutation of the kept slots.
        old_batch, new_batch : int
            Active slots before and after; ``0 <= new_batch <= old_batch``.
        lengths : sequence of int (old_batch,)
            Tokens of each old slot, or an upper bound: that many are copied.

        Returns
        -------
        CompactionPlan
            The plan, for any number of caches with these slots and lengths.

        Raises
        ------
        MappingError
            Entries are missing, out of range or duplicated, or the kept slots do not fill ``0..new_batch-1``.
        RangeError
            A batch size or a length is out of range.
        ShapeError
            Not one length for each old slot.
        PlaceError
            The mapping is a tensor on the device: see :meth:`from_device`.
        """
        old = int_in_range("old_batch", old_batch, 0, MAX_SLOTS)
        new = int_in_range("new_batch", new_batch, 0, old)
        slots = _host_mapping(mapping, old, new)
        if len(lengths) != old:
            raise ShapeError(f"lengths: expected one for each of old_batch={old} slots, got {len(lengths)}.")
        tokens = list(lengths)
        if set(map(type, tokens)) - {int} or not 0 <= min(tokens, default=0) <= max(tokens, default=0) <= MAX_DIMENSION:
            tokens = [int_in_range(f"lengths[{slot}]", length, 0, MAX_DIMENSION) for slot, length in enumerate(tokens)]
        lists = tuple(map(tuple, plan_moves(slots, tokens, MAX_MOVES)))
        max_tokens = max(map(attrgetter("tokens"), chain.from_iterable(lists)), default=0)
        return cls(old, new, lists, max_tokens)

    @staticmethod
    def from_device(mapping: DeviceTensor, old_batch: int, new_batch: int, lengths: DeviceTensor) -> DeviceCompactionPlan:
        """Plan a mapping that only the device knows.

        Parameters
        ----------
        mapping : DeviceTensor (old_batch,) int32
            New slot of each old slot, or -1 to drop it. It must keep the order.
        old_batch, new_batch : int
            Active slots before and after; ``0 <= new_batch <= old_batch``.
        lengths : DeviceTensor (old_batch,) int32
            Tokens of each old slot.

        Returns
        -------
        DeviceCompactionPlan
            The plan.

        Raises
        ------
        RangeError, ShapeError, DTypeError, PlaceError
            An argument does not fit.
        """
        return DeviceCompactionPlan(mapping, old_batch, new_batch, lengths)


@dataclass(frozen=True)
class DeviceCompactionPlan:
    """A compaction whose mapping is read by the device when it runs, so it can be captured in a CUDA graph and replayed.

    Parameters
    ----------
    mapping : DeviceTensor (old_batch,) int32
        New slot of each old slot, or -1 to drop it. It must keep the order of the kept slots, which is not checked: an entry that
        moves a slot up, or outside ``0..new_batch-1``, is ignored.
    old_batch, new_batch : int
        Active slots before and after; ``0 <= new_batch <= old_batch``.
    lengths : DeviceTensor (old_batch,) int32
        Tokens of each old slot, in the same memory. Every part of the compaction reads them, so compact them last.

    Raises
    ------
    RangeError, ShapeError, DTypeError, PlaceError
        An argument does not fit.
    """

    mapping: DeviceTensor
    old_batch: int
    new_batch: int
    lengths: DeviceTensor

    is_identity = False

    def __post_init__(self) -> None:
        old = int_in_range("old_batch", self.old_batch, 0, MAX_DIMENSION)
        object.__setattr__(self, "old_batch", old)
        object.__setattr__(self, "new_batch", int_in_range("new_batch", self.new_batch, 0, old))
        for name, tensor in (("batch_mapping", self.mapping), ("lengths", self.lengths)):
            if not isinstance(tensor, DeviceTensor):
                raise PlaceError(f"{name}: expected a DeviceTensor, got {type(tensor).__name__}.")
            if tensor.dtype != "int32":
                raise DTypeError(f"{name}: expected int32, got {tensor.dtype}.")
            if tensor.shape != (old,) or not tensor.is_contiguous:
                raise ShapeError(f"{name}: expected a dense tensor of shape ({old},), got {tensor!r}.")
        check_memory("batch_mapping", self.mapping, self.lengths.memory)


AnyCompactionPlan = CompactionPlan | DeviceCompactionPlan


def check_plan(moves: AnyCompactionPlan, slots: int, memory: Memory, stream: Any) -> None:
    """Check that a plan, and the stream of its launches, fit a cache of some slots."""
    if not isinstance(moves, CompactionPlan | DeviceCompactionPlan):
        raise MappingError(f"moves: expected a CompactionPlan, got {type(moves).__name__}.")
    if moves.old_batch > slots:
        raise MappingError(f"moves: expected a plan of at most {slots} slots, got one of old_batch={moves.old_batch}.")
    memory.check_stream(stream)
    if isinstance(moves, DeviceCompactionPlan) and moves.mapping.memory is not memory:
        raise PlaceError(f"moves: expected a mapping of {memory.device}, got one of {moves.mapping.memory.device}.")
