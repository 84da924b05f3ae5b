"""Fair shares of the places in a queue."""

from __future__ import annotations

from collections import Counter


def share_of(client: str, taken: Counter[str], places: int) -> int:
    """Return the share of a client: an equal part of the places, also if other clients took them before. ``taken`` has no zeros."""
    # So the clients may have at most (1 + 1/2 + 1/3 + ...) * places in all.
    return places // len(taken.keys() | {client})


def room_for(client: str, taken: Counter[str], places: int) -> int:
    """Return how many more places a client may take: the free ones, or the rest of its share."""
    return max(0, places - taken.total(), share_of(client, taken, places) - taken[client])
