"""``HttpProtocol``: one connection of uvicorn, with limits of what it may send before anybody has looked at it."""

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

from trt_kvcache.server.http.connections import Connections, Waits
from trt_kvcache.server.http.errors import ApiError
from trt_kvcache.server.http.options import ServerOptions

#: Lines of request line and headers: each takes as long to read as a kilobyte.
_MOST_LINES = 500

#: Seconds after which a connection without headers is one that does not send them.
_FRESH = 0.05

#: Seconds in which a client that has its answer may send the rest of a body that nobody reads, to go on with the same connection.
_REST = 5.0

#: Seconds in which a client that was refused may read why, while what it sends is thrown away.
_LINGER = 1.0

#: Seconds after which a client that has closed its sending side is first asked whether it still reads, and at most between two times.
_FIRST_PROBE, _LONGEST_PROBE = 0.02, 2.0

#: The logger of uvicorn's connections. Faults of clients are no lines of the log.
CONNECTION_LOG = "trt_kvcache.server.connection"
_LOGGER = logging.getLogger(CONNECTION_LOG)
_LOGGER.setLevel(logging.ERROR)


class _Parser(h11.Connection):
    """Reads requests, of which the headers have a limit to the byte."""

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
    """One connection.

    It is what uvicorn has for h11, which is there wherever uvicorn is, and does four things more: request line and headers have a limit of
    bytes and of seconds, and connections one of their number; what is refused has a reason in the form of OpenAI's API; a client that
    closes its sending side still gets its answer; and the rest of a body that nobody reads has a limit of seconds.

    Parameters
    ----------
    config, server_state, app_state, _loop : object
        As uvicorn has them.
    options : ServerOptions
        The limits.
    others : Connections
        All of this server.
    """

    conn: _Parser

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        options: ServerOptions,
        others: Connections,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = _Parser(options.max_header_bytes)
        self.logger = _LOGGER
        self.address = ""
        self._options = options
        self._others = others
        self._timer: asyncio.TimerHandle | None = None
        self._refused = False
        self._fresh = True
        self._waits: Waits | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin."""
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._update()

    def data_received(self, data: bytes) -> None:
        """Take what has come."""
        if self._refused:
            return
        super().data_received(data)
        self._fresh = self._fresh and self.cycle is None
        self._update()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Take that no more will come; True keeps the connection open for the answer."""
        cycle = self.cycle
        # In the middle of an answer it is taken for an end of both sides: an interim response cannot ask any more.
        waits = cycle is not None and not cycle.more_body and not cycle.response_started
        if self._refused or not waits or self.conn.their_http_version != b"1.1":
            return False
        cycle.keep_alive = False
        self._timer = self.loop.call_later(_FIRST_PROBE, self._probe, 2 * _FIRST_PROBE)
        return True

    def _probe(self, seconds: float) -> None:
        """Find out whether a client that sends no more still reads: a system without a reader answers that what it gets is for nobody.

        HTTP/1.1 lets a server send any number of interim responses, and a client has to pass over them.
        """
        if self.transport.is_closing() or self.cycle.response_started:
            return
        self.transport.write(b"HTTP/1.1 102 Processing\r\n\r\n")
        self._timer = self.loop.call_later(seconds, self._probe, min(2 * seconds, _LONGEST_PROBE))

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._waits = None
        self._stop_timer()
        self._others.discard(self)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the rest of this one."""
        super().on_response_complete()
        self._update()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request."""
        error = self.conn.error
        if error is not None and error.error_status_hint == 431:
            most = f"{self._options.max_header_bytes} bytes and {_MOST_LINES} lines"
            self._refuse(431, f"headers: expected at most {most} of request line and headers, got more.")
        else:
            reason = str(error or msg).partition(": bytearray")[0].removesuffix(".")
            self._refuse(400, f"request: expected one of HTTP/1.1, got what is none: {reason:.200}.")

    def make_room(self, reason: str, *, at_once: bool) -> None:
        """Close the connection, because there are too many; at once if its descriptor is needed."""
        if self._waits in (Waits.HEADERS, Waits.FRESH, Waits.BODY):
            self._refuse(503, reason, linger=not at_once)
        if at_once:
            self.transport.abort()

    def _update(self) -> None:
        """Note what the connection waits for now, and for how long it may."""
        waits = self._now()
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
        self._others.set(self, waits)

    def _end_unless_read(self, unsent: int) -> None:
        """Close an idle connection. The end of a long answer may still be on its way, if the client takes something of it now and then."""
        left = self.transport.get_write_buffer_size()
        if 0 < left < unsent:
            self._timer = self.loop.call_later(self._options.stalled_seconds, self._end_unless_read, left)
        else:
            self.transport.abort()

    def _now(self) -> Waits | None:
        """Return what the connection waits for; None if it is about to be closed."""
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
        """Answer as well as a connection can be answered whose client is wrong, and read no more of it."""
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
        if begun or not linger:
            self.transport.abort()
            return
        # Closed at once, the answer would be lost with what the client has sent and nobody has read.
        self.transport.write_eof()
        self._update()
