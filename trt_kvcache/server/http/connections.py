"""``Connections``: the open connections of a server, and the choice of one to close if there are too many."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from trt_kvcache.server.http.clients import named, parsed_address

#: File descriptors that are kept free of connections: for files, pipes of workers, connections that are being closed.
_OTHER_DESCRIPTORS = 128

#: Most connections, if the limit of file descriptors allows more.
_MOST = 4096

_LEAST = 16


class Waits(Enum):
    """State of a connection. If there are too many, connections of the first state are closed first."""

    NEXT = "for another request"
    LINGERING = "for its client to stop sending"
    HEADERS = "for the headers of a request"
    BODY = "for the body of a request"
    FRESH = "for headers, just opened"
    ANSWER = "for an answer; never closed for others"


class Closable(Protocol):
    """A connection."""

    address: str

    def make_room(self, reason: str, *, at_once: bool) -> None:
        """Close it for this reason. It has been removed from the list."""


class Connections:
    """The open connections of a server by state, the oldest first. A connection above the limits closes an older one."""

    # most: at once. A further connection closes the oldest one of the first state in the order of Waits, or itself if all wait for answers.
    # most_without_headers: of one address. A further one closes the oldest of them, never itself: nobody else at the same address, such
    # as that of a proxy, is locked out.

    def __init__(self, most: int, most_without_headers: int) -> None:
        self._most = most
        self._most_without_headers = most_without_headers
        self._waiting: dict[Waits, dict[Closable, None]] = {kind: {} for kind in Waits}
        self._without_headers: dict[str, dict[Closable, None]] = {}
        self._kinds: dict[Closable, Waits] = {}

    def set(self, connection: Closable, kind: Waits) -> None:
        """Set the state of a connection. A new one may close another."""
        is_known = connection in self._kinds
        self.discard(connection)
        if kind is Waits.HEADERS:
            same = self._without_headers.get(_network(connection.address), {})
            if len(same) >= self._most_without_headers:
                self._close(
                    next(iter(same)), f"{self._most_without_headers} of one address that have not sent their headers", at_once=False
                )
        if not is_known and len(self._kinds) >= self._most:
            oldest = next((next(iter(found)) for one, found in self._waiting.items() if found and one is not Waits.ANSWER), connection)
            self._close(oldest, f"{self._most} at once", at_once=True)
            if oldest is connection:
                return
        self._kinds[connection] = kind
        self._waiting[kind][connection] = None
        if kind is Waits.HEADERS:
            self._without_headers.setdefault(_network(connection.address), {})[connection] = None

    def discard(self, connection: Closable) -> None:
        """Remove a connection, if it is known."""
        kind = self._kinds.pop(connection, None)
        if kind is None:
            return
        del self._waiting[kind][connection]
        if kind is Waits.HEADERS:
            network = _network(connection.address)
            del self._without_headers[network][connection]
            if not self._without_headers[network]:
                del self._without_headers[network]

    def _close(self, connection: Closable, most: str, *, at_once: bool) -> None:
        self.discard(connection)
        connection.make_room(f"connections: expected at most {most}, got one more. Try again later.", at_once=at_once)

    def __len__(self) -> int:
        """Return the number of open connections."""
        return len(self._kinds)


def _network(address: str) -> str:
    """Return the network of one client: an IPv4 address, or the /64 prefix of an IPv6 address."""
    found = parsed_address(address)
    return address if found is None else named(found)  # a socket of the file system has none


def default_connections() -> int:
    """Return the number of connections that the limit of file descriptors allows, less a reserve."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return _MOST
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(_LEAST, min(_MOST, soft - _OTHER_DESCRIPTORS))
