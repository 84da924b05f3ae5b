"""Checks of trees of tokens and of paths in them, which callers give to ``verify`` and ``accept``. Indices are within a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trt_kvcache._util.checks import as_int, as_sequence, int_in_range
from trt_kvcache.errors import RangeError, ShapeError
from trt_kvcache.kernels.token_tree import MAX_TREE_TOKENS
from trt_kvcache.session.step_plan import Rows, StepPlan


def checked_parents(parents: Any, rows: Rows) -> Rows | None:
    """Return the parents of the tokens of each row, -1 for the root, its first one; None if all rows are chains."""
    given = as_sequence("parents", parents)
    if len(given) != len(rows):
        raise ShapeError(f"parents: expected one sequence for each of {len(rows)} rows of tokens, got {len(given)}.")
    found = [_parents_of(slot, of_slot, len(row)) for slot, (of_slot, row) in enumerate(zip(given, rows, strict=True))]
    if all(of_slot == [*range(-1, len(of_slot) - 1)] for of_slot in found):
        return None
    longest = max(range(len(rows)), key=lambda slot: len(rows[slot]))
    if len(rows[longest]) > MAX_TREE_TOKENS:
        raise ShapeError(f"tokens[{longest}]: expected a tree of at most {MAX_TREE_TOKENS} tokens, got {len(rows[longest])}.")
    return found


def _parents_of(slot: int, parents: Any, count: int) -> list[int]:
    given = as_sequence(f"parents[{slot}]", parents)
    if len(given) != count:
        raise ShapeError(f"parents[{slot}]: expected one parent for each of {count} tokens, got {len(given)}.")
    found = [as_int(f"parents[{slot}][{index}]", parent) for index, parent in enumerate(given)]
    for index, parent in enumerate(found):
        if not index and parent != -1:
            raise RangeError(f"parents[{slot}][0]: expected -1, as the first token is the root, got {parent}.")
        if index:
            int_in_range(f"parents[{slot}][{index}]", parent, 0, index - 1)
    return found


def checked_counts(counts: Sequence[int], verified: StepPlan) -> Rows:
    """Return the first tokens of each row as paths."""
    found = []
    for slot, (count, row) in enumerate(zip(counts, verified.rows, strict=True)):
        path = range(int_in_range(f"counts[{slot}]", count, 0, len(row)))
        parents = _known_parents(verified, slot)
        branch = next((index for index in path if parents[index] != index - 1), None)
        if branch is not None:
            raise RangeError(
                f"counts[{slot}]: expected at most {branch}, as token {branch} of the tree follows token {parents[branch]}, got {count}. "
                "Pass paths."
            )
        found.append(path)
    return found


def checked_paths(paths: Sequence[Any], verified: StepPlan) -> Rows:
    """Return paths from the root of each tree."""
    return [_path_of(slot, path, _known_parents(verified, slot)) for slot, path in enumerate(paths)]


def _path_of(slot: int, path: Any, parents: Sequence[int]) -> list[int]:
    found, before = list[int](), -1
    for place, index in enumerate(as_sequence(f"paths[{slot}]", path)):
        name = f"paths[{slot}][{place}]"
        if not parents:
            raise RangeError(f"{name}: expected nothing, as no token of this slot was run, got {index}.")
        number = int_in_range(name, index, 0, len(parents) - 1)
        if parents[number] != before:
            raise RangeError(f"{name}: expected {f'a token that follows token {before}' if place else '0, the root'}, got {index}.")
        found.append(number)
        before = number
    return found


def _known_parents(verified: StepPlan, slot: int) -> Sequence[int]:
    return range(-1, len(verified.rows[slot]) - 1) if verified.parents is None else verified.parents[slot]
