"""From a batch mapping to steps: moves, and cycles that rotate through a register. No scratch memory, any permutation."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from trt_kvcache.kernels.arguments import MAX_SLOTS

#: In the place of a slot: the register that a thread keeps its part of a slot in. Slots are below it.
REGISTER = MAX_SLOTS


class Step(NamedTuple):
    """Copy the first ``tokens`` tokens of slot ``source`` into slot ``destination``; either may be :data:`REGISTER`."""

    source: int
    destination: int
    tokens: int


def find_chains(mapping: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Split a valid mapping into the ways that slots move along.

    Parameters
    ----------
    mapping : sequence of int
        New slot of each old slot, or -1.

    Returns
    -------
    paths, cycles : lists of lists of int
        Slots ``p0, p1, p2 ...``: the content of ``p1`` goes to ``p0``, that of ``p2`` to ``p1`` and so on. Of a path, what
        ``p0`` held is dropped; of a cycle it goes to the last slot. Slots that stay are in neither.
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


def make_steps(mapping: Sequence[int], lengths: Sequence[int], max_steps: int) -> list[list[Step]]:
    """Turn a valid mapping into steps, in lists that are run one after another.

    Parameters
    ----------
    mapping : sequence of int
        New slot of each old slot, or -1.
    lengths : sequence of int
        Tokens of each old slot.
    max_steps : int
        The longest list, at least 3. Nothing is left in the register at the end of a list.
    """
    paths, cycles = find_chains(mapping)
    lists: list[list[Step]] = [[]]
    for path in paths:
        for destination, source in pairwise(path):
            if len(lists[-1]) == max_steps:
                lists.append([])
            lists[-1].append(Step(source, destination, lengths[source]))
    for cycle in cycles:
        # What is turned: `cycle` with the tokens that each of its slots holds now. A cycle too long for one list is turned
        # in parts: after the first part its last slot holds what p0 held, and begins the cycle of the rest.
        tokens = [lengths[slot] for slot in cycle]
        while len(cycle) > 1:
            part = min(len(cycle), max_steps - 1)
            if len(lists[-1]) + part + 1 > max_steps:
                lists.append([])
            lists[-1].append(Step(cycle[0], REGISTER, tokens[0]))
            lists[-1].extend(Step(cycle[i], cycle[i - 1], tokens[i]) for i in range(1, part))
            lists[-1].append(Step(REGISTER, cycle[part - 1], tokens[0]))
            cycle, tokens = cycle[part - 1 :], [tokens[0], *tokens[part:]]
    return [steps for steps in lists if steps]
