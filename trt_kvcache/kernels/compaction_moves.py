"""Moves of a batch mapping: copies from slot to slot; cycles rotate through a register. Any permutation, no scratch memory."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from trt_kvcache.memory.shapes import MAX_BATCH_SIZE

#: Moves of one launch: compaction kernels exist for these numbers, because each argument costs the host about 40 ns.
MOVE_CAPACITIES = (8, 32, 96)

#: Moves of one launch, at most: enough for any mapping of 64 slots.
MAX_MOVES = MOVE_CAPACITIES[-1]

#: Slots that a move can name: 16 bits, less the one value that stands for the register.
MAX_SLOTS = MAX_BATCH_SIZE

#: In the place of a slot number: the register in which a thread holds its part of a slot. Slot numbers are below it.
REGISTER = MAX_SLOTS


class CompactionMove(NamedTuple):
    """Copy the first ``tokens`` tokens of slot ``source`` to slot ``destination``; either slot may be :data:`REGISTER`."""

    source: int
    destination: int
    tokens: int


def find_chains(mapping: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Split a valid mapping (-1 drops a slot) into paths and cycles ``p0, p1, p2 ...``: p1 moves to p0, p2 to p1 and so on.

    In a path the content of p0 is dropped; in a cycle it moves to the last slot. Slots that stay are in neither.
    """
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
    """Return the moves of a valid mapping, in lists of at most ``max_moves`` (at least 3) that leave nothing in the register."""
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
