"""Moves of a compaction, without any memory: every mapping of up to 5 slots, and large ones in many lists."""

from itertools import permutations, product

import numpy as np
import pytest

from trt_kvcache import HostMemory
from trt_kvcache.errors import KVCacheError
from trt_kvcache.kernels import MAX_MOVES, CompactionPlan, DeviceCompactionPlan
from trt_kvcache.kernels.compaction_moves import REGISTER, CompactionMove, plan_moves
from trt_kvcache.kernels.launch_limits import MAX_SLOTS, MOVE_CAPACITIES

LENGTHS = (13, 10, 0, 12, 11)


def every_mapping(old):
    """All ways to keep some of ``old`` slots, in any order."""
    mappings = []
    for kept in product([False, True], repeat=old):
        for new in permutations(range(sum(kept))):
            slots = iter(new)
            mappings.append([next(slots) if keep else -1 for keep in kept])
    return mappings


def plan_of(mapping, lengths):
    return CompactionPlan.from_host(mapping, len(mapping), sum(new >= 0 for new in mapping), lengths)


def moved(mapping):
    """Old slot of each new slot that has another content afterwards."""
    return {new: old for old, new in enumerate(mapping) if new >= 0 and new != old}


def check_lists(mapping, lists, lengths, most):
    """Carry out moves over slots that hold the number of the slot that their content is from."""
    slots = {slot: slot for slot in range(len(mapping))}
    for moves in lists:
        assert 1 <= len(moves) <= most
        slots.pop(REGISTER, None)  # nothing is left in it
        for move in moves:
            assert move.source != move.destination
            assert move.tokens == lengths[slots[move.source]]
            slots[move.destination] = slots[move.source]
    assert {new: slots[new] for new in moved(mapping)} == moved(mapping)
    for slot in set(range(len(mapping))) - set(moved(mapping)):
        assert slots[slot] == slot  # what stays, and what nobody comes to, is not written


@pytest.mark.parametrize("old", range(6))
def test_every_mapping(old):
    mappings = every_mapping(old)
    assert len(mappings) == [1, 2, 5, 16, 65, 326][old]
    for mapping in mappings:
        plan = plan_of(mapping, LENGTHS[:old])
        check_lists(mapping, plan.move_lists, LENGTHS, MAX_MOVES)
        assert plan.is_identity == (not moved(mapping))
        assert plan.max_tokens == max((LENGTHS[slot] for slot in moved(mapping).values()), default=0)
        for most in (3, 4):
            check_lists(mapping, plan_moves(mapping, LENGTHS, most), LENGTHS, most)


def large_mappings():
    random = np.random.default_rng(5)
    shuffled, kept = random.permutation(500).tolist(), sorted(random.permutation(500)[:320].tolist())
    thinned = [kept.index(slot) if slot in set(kept) else -1 for slot in range(500)]
    return [[*range(1, 300), 0], shuffled, [new if new < 321 else -1 for new in shuffled], thinned]


def unpacked(launch):
    assert len(launch.packed) == launch.capacity
    assert not any(launch.packed[launch.count :])
    assert all(0 <= packed < 2**63 for packed in launch.packed)
    return [CompactionMove(packed >> 47, packed >> 31 & 0xFFFF, packed & 0x7FFFFFFF) for packed in launch.packed[: launch.count]]


@pytest.mark.parametrize("mapping", [*every_mapping(4), *large_mappings()], ids=str)
def test_packed_launches(mapping):
    lengths = np.random.default_rng(7).integers(0, 2**31, len(mapping)).tolist()
    for most in MOVE_CAPACITIES:
        check_lists(mapping, plan_moves(mapping, lengths, most), lengths, most)
    plan = plan_of(mapping, lengths)
    assert [unpacked(launch) for launch in plan.launches] == [list(moves) for moves in plan.move_lists]
    for launch, moves in zip(plan.launches, plan.move_lists, strict=True):
        assert launch.max_tokens == max(move.tokens for move in moves)
        assert launch.capacity == min(capacity for capacity in MOVE_CAPACITIES if capacity >= len(moves))
    slots = dict(enumerate(range(len(mapping))))
    for launch in plan.simultaneous_launches:  # all of a launch at once: read before written, and no register
        moves = unpacked(launch)
        assert len({move.destination for move in moves}) == len(moves)
        slots.update({move.destination: slots[move.source] for move in moves})
    assert {new: slots[new] for new in moved(mapping)} == moved(mapping)


WRONG = [
    ("host", ([], MAX_SLOTS + 1, 0, []), "RangeError: old_batch: expected an integer from 0 to 65535, got 65536."),
    ("host", ([0, 1], 2, 2, [1]), "ShapeError: lengths: expected one for each of old_batch=2 slots, got 1."),
    ("host", ("good", 2, 2, [1, 1]), "PlaceError: batch_mapping: expected integers on the host, got "),
    ("device", ("good", 2, 2, "wide"), "DTypeError: lengths: expected int32, got int64."),
    ("device", ("good", 2, 2, "short"), "ShapeError: lengths: expected a dense tensor of shape (2,), got "),
    ("device", ("good", 2, 2, "other"), "PlaceError: batch_mapping: expected a tensor of cpu, got one of cpu."),
]


def test_refused_and_numbers_of_numpy():
    """Beside the mappings that tests/end_to_end/test_bad_inputs.py has."""
    memories = [HostMemory(), HostMemory()]
    good, other = (memory.to_device(np.zeros(2, np.int32), stream=memory.create_stream()) for memory in memories)
    wide = memories[0].to_device(np.zeros(2, np.int64), stream=memories[0].create_stream())
    tensors = {"good": good, "other": other, "short": good[:1], "wide": wide}
    for make, arguments, message in WRONG:
        with pytest.raises(KVCacheError) as caught:
            getattr(CompactionPlan, f"from_{make}")(*[tensors[one] if isinstance(one, str) else one for one in arguments])
        assert f"{type(caught.value).__name__}: {caught.value}".startswith(message)
    assert isinstance(CompactionPlan.from_device(good, 2, 1, good), DeviceCompactionPlan)
    host = CompactionPlan.from_host
    assert host(np.array([1, 0], np.int32), np.int64(2), np.int64(2), np.array([3, 4])) == host([1, 0], 2, 2, [3, 4])
