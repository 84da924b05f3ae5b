"""Shares of a queue: how many more places a client may have."""

from __future__ import annotations

from collections import Counter


def share_of(client: str, taken: Counter[str], places: int) -> int:
    """Return how many places a client may have in any case, whatever the others took before it came: as many as each of them.

    In all the clients then have at most ``(1 + 1/2 + 1/3 + ...) * places``.

    Parameters
    ----------
    client : str
        Its name.
    taken : Counter of str
        How many places each client has now; only those that have any.
    places : int
        How many there are.

    Returns
    -------
    int
        0 if there are more clients than places.

    Examples
    --------
    >>> share_of("b", Counter(a=8), 8), share_of("a", Counter(a=8), 8)
    (4, 8)
    """
    return places // len(taken.keys() | {client})


def room_for(client: str, taken: Counter[str], places: int) -> int:
    """Return how many more places a client may take: those that are free, or what it lacks to its share.

    Parameters
    ----------
    client, taken, places : str, Counter of str, int
        As for :func:`share_of`.

    Returns
    -------
    int
        At least 0.

    Examples
    --------
    >>> room_for("a", Counter(a=3), 8), room_for("b", Counter(a=8), 8), room_for("a", Counter(a=8, b=1), 8)
    (5, 4, 0)
    """
    return max(0, places - taken.total(), share_of(client, taken, places) - taken[client])
