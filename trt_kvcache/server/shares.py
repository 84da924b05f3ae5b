"""Shares of a queue: how many more places a client may have."""

from __future__ import annotations

from collections import Counter


def share_of(client: str, taken: Counter[str], places: int) -> int:
    """Return how many places a client may have in any case, whatever the others took before it came: as many as each of them."""
    return places // len(taken.keys() | {client})


def room_for(client: str, taken: Counter[str], places: int) -> int:
    """Return how many more places a client may take: those that are free, or what it lacks to its share."""
    return max(0, places - taken.total(), share_of(client, taken, places) - taken[client])
