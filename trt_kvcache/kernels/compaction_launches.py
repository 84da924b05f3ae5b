"""Moves of a compaction, packed into the arguments of a launch."""

from collections.abc import Sequence
from dataclasses import dataclass

from trt_kvcache.kernels.compaction_moves import MOVE_CAPACITIES, REGISTER, CompactionMove

#: First bits of a packed move; its tokens are the lowest bits.
_DESTINATION_BIT, _SOURCE_BIT = 31, 47


@dataclass(frozen=True)
class CompactionLaunch:
    """The moves of one launch."""

    capacity: int  # moves that the kernel takes: the number at the end of its name
    max_tokens: int  # tokens of the longest move
    count: int  # moves that are carried out
    packed: tuple[int, ...]  # ``Move`` of plugins/compaction.cuh, padded with zeros to the capacity


def pack_moves(moves: Sequence[CompactionMove]) -> CompactionLaunch:
    """Pack moves for the smallest kernel that carries them out one after another."""
    capacity = next(capacity for capacity in MOVE_CAPACITIES if capacity >= len(moves))
    packed = [source << _SOURCE_BIT | destination << _DESTINATION_BIT | tokens for source, destination, tokens in moves]
    max_tokens = max(tokens for _, _, tokens in moves)
    return CompactionLaunch(capacity, max_tokens, len(moves), (*packed, *[0] * (capacity - len(packed))))


def pack_simultaneous_moves(moves: Sequence[CompactionMove]) -> CompactionLaunch:
    """Pack the same moves for a kernel that reads all slots before it writes one, and so needs no register."""
    held = REGISTER
    direct = []
    for move in moves:
        if move.destination == REGISTER:
            held = move.source
        else:
            direct.append(move._replace(source=held) if move.source == REGISTER else move)
    return pack_moves(direct)
