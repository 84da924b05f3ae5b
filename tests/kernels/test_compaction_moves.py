"""Moves of a compaction, without any memory: every mapping of up to 5 slots, and large ones in many lists."""

from __future__ import annotations

from itertools import permutations, product
from typing import Any

import numpy as np
import pytest

from tests.helpers.assertions import raises
from trt_kvcache import HostMemory
from trt_kvcache.errors import DTypeError, MappingError, PlaceError, RangeError, ShapeError
from trt_kvcache.kernels import MAX_MOVES, CompactionPlan, DeviceCompactionPlan
from trt_kvcache.kernels.compaction_launches import CompactionLaunch
from trt_kvcache.kernels.compaction_moves import MAX_SLOTS, MOVE_CAPACITIES, REGISTER, CompactionMove, plan_moves

LENGTHS = (13, 10, 0, 12, 11)


def every_mapping(old: int) -> list[list[int]]:
    """All ways to keep some of ``old`` slots, in any order."""
    mappings = []
    for kept in product([False, True], repeat=old):
        for new in permutations(range(sum(kept))):
            slots = iter(new)
            mappings.append([next(slots) if keep else -1 for keep in kept])
    return mappings


def moved(mapping: list[int]) -> dict[int, int]:
    """Old slot of each new slot that has another content afterwards."""
    return {new: old for old, new in enumerate(mapping) if new >= 0 and new != old}


def run(moves: list[CompactionMove], slots: dict[int, int], lengths: Any) -> None:
    """Carry out moves over slots that hold the number of the slot that their content is from."""
    for move in moves:
        assert move.source != move.destination
        assert move.tokens == lengths[slots[move.source]]
        slots[move.destination] = slots[move.source]


def check_lists(mapping: list[int], lists: list[list[CompactionMove]], lengths: Any, most: int) -> None:
    slots = {slot: slot for slot in range(len(mapping))}
    for moves in lists:
        assert 1 <= len(moves) <= most
        slots.pop(REGISTER, None)  # nothing is left in it
        run(moves, slots, lengths)
    assert {new: slots[new] for new in moved(mapping)} == moved(mapping)
    for slot in set(range(len(mapping))) - set(moved(mapping)):
        assert slots[slot] == slot  # what stays, and what nobody comes to, is not written


@pytest.mark.parametrize("old", range(6))
def test_every_mapping(old):
    mappings = every_mapping(old)
    assert len(mappings) == [1, 2, 5, 16, 65, 326][old]
    for mapping in mappings:
        plan = CompactionPlan.from_host(mapping, old, sum(new >= 0 for new in mapping), LENGTHS[:old])
        check_lists(mapping, [list(moves) for moves in plan.move_lists], LENGTHS, MAX_MOVES)
        assert plan.is_identity == (not moved(mapping))
        assert plan.max_tokens == max((LENGTHS[slot] for slot in moved(mapping).values()), default=0)
        for most in (3, 4):
            check_lists(mapping, plan_moves(mapping, LENGTHS, most), LENGTHS, most)


def large_mappings() -> dict[str, list[int]]:
    random = np.random.default_rng(5)
    shuffled, kept = random.permutation(500).tolist(), sorted(random.permutation(500)[:320].tolist())
    return {
        "one cycle of 300": [*range(1, 300), 0],
        "pairs": [slot ^ 1 for slot in range(200)],
        "a shift": [-1, *range(199)],
        "shuffled": shuffled,
        "shuffled and thinned": [new if new < 321 else -1 for new in shuffled],
        "thinned": [kept.index(slot) if slot in set(kept) else -1 for slot in range(500)],
    }


@pytest.mark.parametrize("most", MOVE_CAPACITIES)
@pytest.mark.parametrize("mapping", large_mappings().values(), ids=large_mappings())
def test_many_lists(mapping, most):
    lengths = np.random.default_rng(6).integers(0, 99, len(mapping)).tolist()
    lists = plan_moves(mapping, lengths, most)
    assert len(lists) > 1
    check_lists(mapping, lists, lengths, most)


@pytest.mark.parametrize("mapping", [[slot ^ 1 for slot in range(64)], [*range(1, 64), 0], [-1, *range(63)], list(range(64))[::-1]])
def test_64_slots_are_one_launch(mapping):
    plan = CompactionPlan.from_host(mapping, 64, sum(new >= 0 for new in mapping), [1] * 64)
    assert len(plan.launches) == 1


def unpacked(arguments: CompactionLaunch) -> list[CompactionMove]:
    assert len(arguments.packed) == arguments.capacity
    assert not any(arguments.packed[arguments.count :])
    assert all(0 <= packed < 2**63 for packed in arguments.packed)
    return [CompactionMove(packed >> 47, packed >> 31 & 0xFFFF, packed & 0x7FFFFFFF) for packed in arguments.packed[: arguments.count]]


class TestArguments:
    @pytest.mark.parametrize("mapping", [[1, 0, -1, 2], *large_mappings().values()])
    def test_packed(self, mapping):
        lengths = np.random.default_rng(7).integers(0, 2**31, len(mapping)).tolist()
        plan = CompactionPlan.from_host(mapping, len(mapping), sum(new >= 0 for new in mapping), lengths)
        launches = plan.launches
        assert [unpacked(arguments) for arguments in launches] == [list(moves) for moves in plan.move_lists]
        for arguments, moves in zip(launches, plan.move_lists, strict=True):
            assert arguments.max_tokens == max(move.tokens for move in moves)
            assert arguments.capacity == min(capacity for capacity in MOVE_CAPACITIES if capacity >= len(moves))

    @pytest.mark.parametrize("mapping", [*every_mapping(4), *large_mappings().values()], ids=str)
    def test_direct(self, mapping):
        """All of a launch at once: read before written, and no register."""
        plan = CompactionPlan.from_host(mapping, len(mapping), sum(new >= 0 for new in mapping), [0] * len(mapping))
        slots = dict(enumerate(range(len(mapping))))
        for arguments in plan.simultaneous_launches:
            moves = unpacked(arguments)
            assert len({move.destination for move in moves}) == len(moves)
            slots.update({move.destination: slots[move.source] for move in moves})
        assert {new: slots[new] for new in moved(mapping)} == moved(mapping)

    def test_the_last_slot(self):
        mapping = [*range(MAX_SLOTS - 2), MAX_SLOTS - 1, MAX_SLOTS - 2]
        plan = CompactionPlan.from_host(mapping, MAX_SLOTS, MAX_SLOTS, [2**31 - 1] * MAX_SLOTS)
        (arguments,) = plan.launches
        assert unpacked(arguments) == list(plan.move_lists[0])


class TestRefused:
    @pytest.mark.parametrize(
        ("mapping", "old", "new", "parts"),
        [
            ([0, 1], 3, 2, ("batch_mapping", "old_batch=3 entries", 2)),
            ([0, 1, 2], 2, 2, ("batch_mapping", "old_batch=2 entries", 3)),
            ([0, 2, -1], 3, 2, ("batch_mapping[1]", "-1 or a slot below new_batch=2", 2)),
            ([0, -2, 1], 3, 2, ("batch_mapping[1]", "-1 or a slot below new_batch=2", -2)),
            ([1, 0, 1], 3, 2, ("batch_mapping: old slots 0 and 2 both go to slot 1",)),
            ([-1, 0, -1], 3, 2, ("batch_mapping", "survivors for all of new_batch=2 slots", "none for [1]")),
            ([0], 1, 0, ("batch_mapping[0]", "-1 or a slot below new_batch=0", 0)),
            ([0, 1.0], 2, 2, ("batch_mapping[1]", "integer", "1.0")),
            ([0, True], 2, 2, ("batch_mapping[1]", "integer", "True")),
            ("01", 2, 2, ("batch_mapping", "sequence of integers", "str")),
            ({0: 1}, 1, 1, ("batch_mapping", "sequence of integers", "dict")),
            (None, 1, 1, ("batch_mapping", "sequence of integers", "NoneType")),
            (np.array([0.0, 1.0]), 2, 2, ("batch_mapping", "integers of shape (old_batch,)", "float64 (2,)")),
            (np.array([[0, 1]]), 1, 1, ("batch_mapping", "integers of shape (old_batch,)", "int64 (1, 2)")),
        ],
    )
    def test_mapping(self, mapping, old, new, parts):
        with raises(MappingError, *parts):
            CompactionPlan.from_host(mapping, old, new, [1] * old)

    @pytest.mark.parametrize(
        ("old", "new", "lengths", "error", "parts"),
        [
            (-1, 0, [], RangeError, ("old_batch", "0 to 65535", -1)),
            (MAX_SLOTS + 1, 0, [], RangeError, ("old_batch", "0 to 65535", 65536)),
            (2, 3, [1, 1], RangeError, ("new_batch", "0 to 2", 3)),
            (2, -1, [1, 1], RangeError, ("new_batch", "0 to 2", -1)),
            (2, 2, [1], ShapeError, ("lengths", "one for each of old_batch=2 slots", 1)),
            (2, 2, [1, -1], RangeError, ("lengths[1]", "0 to 2147483647", -1)),
        ],
    )
    def test_sizes(self, old, new, lengths, error, parts):
        with raises(error, *parts):
            CompactionPlan.from_host(list(range(2)), old, new, lengths)

    def test_numbers_of_numpy(self):
        mapping = np.array([1, 0], np.int32)
        plan = CompactionPlan.from_host(mapping, np.int64(2), np.int64(2), np.array([3, 4]))
        assert plan == CompactionPlan.from_host([1, 0], 2, 2, [3, 4])

    def test_a_mapping_on_the_device(self):
        memory = HostMemory()
        stream = memory.create_stream()
        good, wide = (memory.to_device(np.zeros(2, dtype), stream=stream) for dtype in (np.int32, np.int64))
        with raises(PlaceError, "batch_mapping", expected="integers on the host", got="DeviceTensor((2,), int32, cpu)"):
            CompactionPlan.from_host(good, 2, 2, [1, 1])
        foreign = HostMemory().to_device(np.zeros(2, np.int32), stream=stream)
        for arguments, error, parts in (
            (([0, 1], 2, 2, good), PlaceError, ("batch_mapping", "DeviceTensor", "list")),
            ((good, 2, 2, [1, 1]), PlaceError, ("lengths", "DeviceTensor", "list")),
            ((wide, 2, 2, good), DTypeError, ("batch_mapping", "int32", "int64")),
            ((good, 2, 2, wide), DTypeError, ("lengths", "int32", "int64")),
            ((good, 3, 2, good), ShapeError, ("batch_mapping", "dense tensor of shape (3,)", "DeviceTensor((2,), int32, cpu)")),
            ((good, 2, 2, good[:1]), ShapeError, ("lengths", "dense tensor of shape (2,)", "DeviceTensor((1,), int32, cpu)")),
            ((good, 2, 3, good), RangeError, ("new_batch", "0 to 2", 3)),
            ((good, 2, 2, foreign), PlaceError, ("batch_mapping", "tensor of cpu", "one of cpu")),
        ):
            with raises(error, *parts):
                CompactionPlan.from_device(*arguments)
        assert isinstance(CompactionPlan.from_device(good, 2, 1, good), DeviceCompactionPlan)
