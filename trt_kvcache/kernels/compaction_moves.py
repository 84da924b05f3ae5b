"""From a batch mapping to moves: copies from slot to slot, where cycles rotate through a register. Any permutation, no scratch memory."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from trt_kvcache.memory.shapes import MAX_BATCH_SIZE

#: Moves that one launch carries: its kernels exist in these sizes, because each argument costs the host about 40 ns. ``plugins/moves.cuh``
#: has the same numbers.
MOVE_CAPACITIES = (8, 32, 96)

#: Moves that one launch carries at most: enough for any mapping of 64 slots.
MAX_MOVES = MOVE_CAPACITIES[-1]

#: Slots that a move can name: 16 bits, less the one value that stands for the register.
MAX_SLOTS = MAX_BATCH_SIZE

#: In the place of a slot number: the register in which a thread keeps its part of a slot. Slot numbers are below it.
REGISTER = MAX_SLOTS


class CompactionMove(NamedTuple):
    """Copy the first ``tokens`` tokens of slot ``source`` to slot ``destination``; either slot may be :data:`REGISTER`."""

    source: int
    destination: int
    tokens: int


def find_chains(mapping: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Split a valid mapping into paths and cycles."""
    source_of = {new: old for old, new in enumerate(mapping) if new >= 0 and new != old}
    paths = [[slot] for slot in source_of if slot >= len(mapping) or mapping[slot] < 0]
    for path in paths:
        while path[-1] in source_of:
            path.append(source_of.pop(path[-1]))
    cycles = []
    while source_of:
        cycle = [next(iter(source_of))]
        while source_of[cycle[-1]] != cycle[0]:
            cycle.append(source_of.pop(cycle[-1]))
        del source_of[cycle[-1]]
        cycles.append(cycle)
    return paths, cycles


def plan_moves(mapping: Sequence[int], lengths: Sequence[int], max_moves: int) -> list[list[CompactionMove]]:
    """Turn a valid mapping into moves."""
    paths, cycles = find_chains(mapping)
    lists: list[list[CompactionMove]] = [[]]
    for path in paths:
        for destination, source in pairwise(path):
            if len(lists[-1]) == max_moves:
                lists.append([])
            lists[-1].append(CompactionMove(source, destination, lengths[source]))
    for cycle in cycles:
        # `tokens` are those that each slot of the cycle holds now. A cycle too long for one list is rotated in parts: after the first
        # part, its last slot holds what p0 held, and starts the cycle of the remaining slots.
        tokens = [lengths[slot] for slot in cycle]
        while len(cycle) > 1:
            part = min(len(cycle), max_moves - 1)
            if len(lists[-1]) + part + 1 > max_moves:
                lists.append([])
            lists[-1].append(CompactionMove(cycle[0], REGISTER, tokens[0]))
            lists[-1].extend(CompactionMove(cycle[i], cycle[i - 1], tokens[i]) for i in range(1, part))
            lists[-1].append(CompactionMove(REGISTER, cycle[part - 1], tokens[0]))
            cycle, tokens = cycle[part - 1 :], [tokens[0], *tokens[part:]]
    return [moves for moves in lists if moves]
