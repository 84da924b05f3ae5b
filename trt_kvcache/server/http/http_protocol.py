"""``HttpProtocol``: one connection of uvicorn, with limits of what it may send before a request is complete."""

from __future__ import annotations

import asyncio
import json
import logging
from http import HTTPStatus
from typing import Any

import h11
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from trt_kvcache.server.http.api_errors import ApiError
from trt_kvcache.server.http.connections import Connections, Waits
from trt_kvcache.server.http.server_options import ServerOptions

#: Most lines of request line and headers: a line takes as long to parse as a kilobyte.
_MOST_LINES = 500

#: Seconds after which a new connection without headers counts as slow (``Waits.HEADERS`` instead of ``Waits.FRESH``).
_FRESH = 0.05

#: Seconds for the rest of a body that is not needed, after the answer; then the connection can be used again.
_REST = 5.0

#: Seconds for a refused client to read the reason, while its data is discarded.
_LINGER = 1.0

#: Seconds until the first probe of a client that has closed its sending side, and at most between two probes.
_FIRST_PROBE, _LONGEST_PROBE = 0.02, 2.0

#: The logger of uvicorn's connections. Errors of clients are not logged.
CONNECTION_LOG = "trt_kvcache.server.connection"
_LOGGER = logging.getLogger(CONNECTION_LOG)
_LOGGER.setLevel(logging.ERROR)


class _Parser(h11.Connection):
    """Parses requests, with an exact limit of bytes for the headers."""

    def __init__(self, max_header_bytes: int) -> None:
        super().__init__(h11.SERVER, max_header_bytes)
        self._most = max_header_bytes
        self.error: h11.RemoteProtocolError | None = None

    def next_event(self) -> Any:
        """Return the next event, or raise."""
        before = self.trailing_data[0] if self.their_state is h11.IDLE else b""
        try:
            if before.partition(b"\r\n\r\n")[0].count(b"\n") >= _MOST_LINES:
                raise h11.RemoteProtocolError("too many lines", error_status_hint=431)
            event = super().next_event()
            if isinstance(event, h11.Request) and len(before) - len(self.trailing_data[0]) > self._most:
                raise h11.RemoteProtocolError("too long", error_status_hint=431)
        except h11.RemoteProtocolError as error:
            self.error = error
            raise
        return event


class HttpProtocol(H11Protocol):
    """One connection."""

    # It adds to uvicorn's protocol for h11, which every installation of uvicorn has:
    # - limits: bytes and seconds of request line and headers, seconds for the rest of an unneeded body, number of connections;
    # - errors in the format of OpenAI's API;
    # - the answer for a client that has closed its sending side.

    conn: _Parser

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        options: ServerOptions,
        connections: Connections,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = _Parser(options.max_header_bytes)
        self.logger = _LOGGER
        self.address = ""
        self._options = options
        self._connections = connections
        self._timer: asyncio.TimerHandle | None = None
        self._refused = False
        self._fresh = True
        self._waits: Waits | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Register the connection."""
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._update()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes."""
        if self._refused:
            return
        super().data_received(data)
        self._fresh = self._fresh and self.cycle is None
        self._update()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Handle the end of the sending side of the client. True keeps the connection open for the answer."""
        cycle = self.cycle
        # In the middle of an answer no interim response can probe the client, so the connection is closed.
        waits = cycle is not None and not cycle.more_body and not cycle.response_started
        if self._refused or not waits or self.conn.their_http_version != b"1.1":
            return False
        cycle.keep_alive = False
        self._timer = self.loop.call_later(_FIRST_PROBE, self._probe, 2 * _FIRST_PROBE)
        return True

    def _probe(self, seconds: float) -> None:
        """Probe whether a client that has closed its sending side still reads: if it does not, its system resets the connection.

        HTTP/1.1 allows any number of interim responses; clients ignore them.
        """
        if self.transport.is_closing() or self.cycle.response_started:
            return
        self.transport.write(b"HTTP/1.1 102 Processing\r\n\r\n")
        self._timer = self.loop.call_later(seconds, self._probe, min(2 * seconds, _LONGEST_PROBE))

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection."""
        self._waits = None
        self._stop_timer()
        self._connections.discard(self)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the rest of the current one."""
        super().on_response_complete()
        self._update()

    def send_400_response(self, msg: str) -> None:
        """Refuse a malformed request."""
        error = self.conn.error
        if error is not None and error.error_status_hint == 431:
            most = f"{self._options.max_header_bytes} bytes and {_MOST_LINES} lines"
            self._refuse(431, f"headers: expected at most {most} of request line and headers, got more.")
        else:
            reason = str(error or msg).partition(": bytearray")[0].removesuffix(".")
            self._refuse(400, f"request: expected a request of HTTP/1.1, got an error: {reason:.200}.")

    def make_room(self, reason: str, *, at_once: bool) -> None:
        """Close the connection, because there are too many: immediately if its descriptor is needed."""
        if self._waits in (Waits.HEADERS, Waits.FRESH, Waits.BODY):
            self._refuse(503, reason, linger=not at_once)
        if at_once:
            self.transport.abort()

    def _update(self) -> None:
        """Update the state of the connection, and set its timeout."""
        waits = self._state()
        if waits is self._waits or waits is None:
            return
        self._waits = waits
        self._stop_timer()
        if waits is Waits.FRESH:
            self._timer = self.loop.call_later(_FRESH, self._age)
        elif waits is Waits.HEADERS:
            self._timer = self.loop.call_later(self._options.header_seconds, self._headers_late)
        elif waits is Waits.NEXT:
            self._timer = self.loop.call_later(self.timeout_keep_alive, self._end_unless_read, self.transport.get_write_buffer_size())
        elif waits is Waits.LINGERING:
            self._timer = self.loop.call_later(_LINGER if self._refused else min(_REST, self._options.body_seconds), self.transport.abort)
        self._connections.set(self, waits)

    def _end_unless_read(self, unsent: int) -> None:
        """Close an idle connection, unless its client has read some of the unsent bytes of its answer since the last call."""
        left = self.transport.get_write_buffer_size()
        if 0 < left < unsent:
            self._timer = self.loop.call_later(self._options.stalled_seconds, self._end_unless_read, left)
        else:
            self.transport.abort()

    def _state(self) -> Waits | None:
        """Return the state of the connection; None if it is closing."""
        if self._refused:
            return Waits.LINGERING
        if self.transport.is_closing():
            return None
        answered = self.cycle is None or self.cycle.response_complete
        if not answered:
            return Waits.BODY if self.cycle.more_body else Waits.ANSWER
        if self.conn.their_state is h11.SEND_BODY:
            return Waits.LINGERING
        if self.cycle is not None and not self.conn.trailing_data[0]:
            return Waits.NEXT
        return Waits.FRESH if self._fresh else Waits.HEADERS

    def _age(self) -> None:
        self._fresh = False
        self._update()

    def _headers_late(self) -> None:
        self._refuse(408, f"headers: expected request line and headers within {self._options.header_seconds:g} seconds.")

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: int, message: str, *, linger: bool = True) -> None:
        """Send an error if no answer has begun, and read no more."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._unset_keepalive_if_required()
        answering = self.cycle is not None and not self.cycle.response_complete
        begun = answering and self.cycle.response_started
        if answering:
            self.cycle.disconnected = True
            self.cycle.waiting_for_100_continue = False
            self.cycle.message_event.set()
        if not begun:
            body = json.dumps(ApiError(status, message).body).encode()
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            self.transport.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        if begun or not linger or not self._sent_eof():
            self.transport.abort()
            return
        self._update()

    def _sent_eof(self) -> bool:
        """Send the end of the answer, and read on. Return False if the client has closed or reset the connection."""
        # If it were closed now, unread bytes of the client would make TCP reset the connection, and the answer would be lost.
        try:
            self.transport.write_eof()
        except OSError:
            return False
        return True
