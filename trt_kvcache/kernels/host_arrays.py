"""NumPy arrays over tensors of host memory, and the moves of a compaction over an array."""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np

from trt_kvcache.kernels.compaction_moves import REGISTER, CompactionMove
from trt_kvcache.kernels.compaction_plan import AnyCompactionPlan, CompactionPlan
from trt_kvcache.memory.host_memory import HostMemory
from trt_kvcache.memory.tensor import DeviceTensor

Array = np.ndarray[Any, Any]


def array_of(tensor: DeviceTensor) -> Array:
    """Return the tensor as a writable array over the same bytes."""
    memory = tensor.memory
    assert isinstance(memory, HostMemory)
    return memory.array(tensor)


def bytes_of(tensor: DeviceTensor) -> Array:
    """Return K/V rows as uint8, with the bytes of a row as the last dimension: copies then depend on no dtype."""
    return array_of(tensor).view(np.uint8)


def new_counts(new_lengths: DeviceTensor | None, tokens: Array) -> list[int]:
    """Return the new tokens of each slot of an activation ``[B, s, ...]``: all s without ``new_lengths``."""
    slots, width = tokens.shape[:2]
    wanted = [width] * slots if new_lengths is None else array_of(new_lengths).tolist()
    return [max(min(count, width), 0) for count in wanted]


def moves_of(plan: AnyCompactionPlan, tokens_per_row: int = 1) -> list[CompactionMove]:
    """Return the moves of a plan, in order. A mapping in a tensor is read now; entries that do not keep the order are ignored."""
    if isinstance(plan, CompactionPlan):
        return list(chain.from_iterable(plan.of_rows(tokens_per_row).move_lists))
    mapping, lengths = array_of(plan.mapping).tolist(), array_of(plan.lengths).tolist()
    kept = [(old, new) for old, new in enumerate(mapping) if 0 <= new < old]
    return [CompactionMove(old, new, -(-max(lengths[old], 0) // tokens_per_row)) for old, new in kept]


def carry_out(slots: Array, moves: Iterable[CompactionMove], *, whole_slots: bool) -> None:
    """Carry out moves in place over an array (B, H, S, row bytes), or with ``whole_slots`` (B, ...)."""
    held = slots[0]
    for move in moves:
        part = (...,) if whole_slots else (slice(None), slice(0, move.tokens))
        source = held if move.source == REGISTER else slots[move.source]
        if move.destination == REGISTER:
            held = np.empty_like(source[part])  # of the live rows only: a whole slot would touch far more memory
        destination = held if move.destination == REGISTER else slots[move.destination]
        destination[part] = source[part]
