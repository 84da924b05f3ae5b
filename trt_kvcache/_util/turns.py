"""``Turns``: a fair queue of several clients."""

from collections.abc import Iterator, Mapping
from itertools import count, islice
from threading import RLock
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class _Line(dict[_Item, None]):
    """Waiting items of one client, first in, first out, and the time its last turn ended."""

    def __init__(self, since: int) -> None:
        super().__init__()
        self.since = since


class Turns(Generic[_Item]):
    """Queues by client: a free place goes to the client with the fewest places. Among equals it goes to the client that has waited longest.

    No client waits for ever, and one without items has no state here. Thread-safe.
    """

    def __init__(self) -> None:
        self._lines: dict[str, _Line[_Item]] = {}  # in the order of ``since``
        self._count = 0
        self._clock = count()
        self._lock = RLock()  # after an interrupt that left it locked, the same thread goes on

    def __len__(self) -> int:
        return self._count

    @property
    def num_clients(self) -> int:
        """Number of clients with waiting items."""
        return len(self._lines)

    def add(self, client: str, item: _Item) -> None:
        """Append a new item to the queue of a client."""
        with self._lock:
            if client not in self._lines:
                self._lines[client] = _Line(next(self._clock))
            self._lines[client][item] = None
            self._count += 1

    def discard(self, client: str, item: _Item) -> bool:
        """Remove an item from its queue. Return False if it was not there."""
        with self._lock:
            line = self._lines.get(client)
            if line is None or item not in line:
                return False
            del line[item]
            self._count -= 1
            if not line:
                del self._lines[client]
            return True

    def end_turn(self, client: str) -> None:
        """Put a client after the others with equally many places: it has just got a place, or left one."""
        with self._lock:
            line = self._lines.pop(client, None)
            if line is not None:
                line.since = next(self._clock)
                self._lines[client] = line

    def first(self, free: int, held: Mapping[str, int]) -> list[_Item]:
        """Return the items that get the next ``free`` places, in order. They stay queued. ``held``: places of each client."""
        with self._lock:
            return [] if free < 1 else list(islice(self._in_turn(held), free))

    def _in_turn(self, held: Mapping[str, int]) -> Iterator[_Item]:
        """Yield all items. The cost of each depends on the clients that have a place, not on the many without one."""
        has = {client: number for client, number in held.items() if number and client in self._lines}
        since = {client: self._lines[client].since for client in has}
        rest = {client: iter(self._lines[client]) for client in has}
        without = (client for client in self._lines if not held.get(client))
        turn = next(self._clock)
        while True:
            client = next(without, None)
            if client is not None:
                has[client], rest[client] = 0, iter(self._lines[client])
            elif not rest:
                return
            else:
                client = min(rest, key=lambda one: (has[one], since[one]))
            item = next(rest[client], None)
            if item is None:
                del rest[client]
                continue
            yield item
            has[client] += 1
            turn += 1
            since[client] = turn
