"""Random trees of tokens, and paths in them."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random


def random_parents(random: Random, count: int) -> list[int]:
    """Return the parents of ``count`` tokens, the first of which is the root; deep and flat trees are as likely."""
    reach = random.choice([1, 2, 3, count])
    return [max(index - random.randint(1, reach), 0) if index else -1 for index in range(count)]


def path_to(parents: Sequence[int], index: int) -> list[int]:
    """Return the indices from the root to a token."""
    path = [index]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path
