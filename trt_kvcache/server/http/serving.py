"""Running the application: a socket, uvicorn, and a graceful shutdown."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from trt_kvcache.errors import ConfigError
from trt_kvcache.server.async_engine import AsyncEngine
from trt_kvcache.server.http.connections import Connections, default_connections
from trt_kvcache.server.http.http_protocol import CONNECTION_LOG, HttpProtocol
from trt_kvcache.server.http.server_options import ServerOptions, is_loopback
from trt_kvcache.server.http.service import Service

#: Most connections that wait to be accepted.
_BACKLOG = 2048

#: Connections accepted in one turn of the event loop: their descriptors are counted only afterwards.
_ACCEPTED_AT_ONCE = 16

#: Seconds for the errors of requests that draining has cut off, before uvicorn cancels what is left.
_ENDING = 2

#: Seconds an idle connection stays open for the next request.
_KEEP_ALIVE = 65


class Server(uvicorn.Server):
    """A uvicorn server: the first signal drains it, a second one ends it immediately."""

    def __init__(
        self,
        app: FastAPI,
        engine: AsyncEngine,
        *,
        options: ServerOptions | None = None,
        drain_seconds: float = 30.0,
        on_start: Callable[[], object] | None = None,
        on_drain: Callable[[], object] | None = None,
    ) -> None:
        allowed = options or ServerOptions()
        connections = Connections(allowed.max_connections or default_connections(), allowed.max_connections_without_headers)
        protocol: Any = partial(HttpProtocol, options=allowed, connections=connections)
        # Always this event loop and protocol, whatever else is installed: they enforce the limits of connections.
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http=protocol,
            ws="none",
            backlog=_ACCEPTED_AT_ONCE,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # uvicorn would trust every process of this machine; Clients reads the header of proxies
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=max(1, round(drain_seconds)) + _ENDING,
        )
        super().__init__(config)
        self._service: Service = app.state.service
        self._engine, self._drain_seconds = engine, drain_seconds
        self._on_start = on_start
        self._on_drain = on_drain

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, then listen."""
        await super().startup(sockets)
        for bound in sockets or ():
            bound.listen(_BACKLOG)
        if self._on_start is not None and self.started:
            self._on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle SIGTERM or SIGINT."""
        if self.should_exit:
            self.force_exit = True
            for name in ("uvicorn.error", CONNECTION_LOG):  # answers that are cut off now are no errors
                logging.getLogger(name).disabled = True
            return
        self.should_exit = True
        if self._on_drain is not None:
            self._on_drain()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests, and wait for the live ones; those that take too long end with an error."""
        draining = asyncio.create_task(self._engine.drain(self._drain_seconds))
        await asyncio.sleep(0)  # the engine refuses requests from now on
        self._service.close()  # the engine would refuse conversations that are being rendered
        await super().shutdown(sockets)
        draining.cancel()


def bound_socket(host: str, port: int, options: ServerOptions) -> socket.socket:
    """Return a listening socket. Raise ConfigError if other machines could reach a server without keys."""
    if not options.api_keys and not options.any_host and not is_loopback(host):
        raise ConfigError(
            f"host: expected an address of this machine alone, such as 127.0.0.1, for a server without API keys, got {host!r}. "
            "Give it api_keys, or any_host=True."
        )
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise ConfigError(f"host: expected a name or an address, got {host!r}: {error.strerror}.") from None
    # asyncio sets TCP_NODELAY only if the protocol is given: without it, small events are delayed by 40 ms.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address[:2])
        bound.listen(_BACKLOG)
    except BaseException as error:
        bound.close()
        if not isinstance(error, OSError):
            raise
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port: expected one that is free, got {port}, which another process has. Choose another one, or 0."
            ) from None
        raise OSError(error.errno, error.strerror, f"{host}:{port}") from None
    return bound


def address_of(bound: socket.socket) -> str:
    """Return the URL of a socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(server: Server, sockets: Sequence[socket.socket]) -> None:
    """Serve until a signal; close the sockets. In the main thread it handles SIGINT and SIGTERM."""
    server.run(sockets=list(sockets))
