"""``Guard``: an ASGI middleware that checks API keys, the Host header, and size and time of bodies."""

from __future__ import annotations

import asyncio
import hmac
import re
import time

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trt_kvcache.server.http.api_errors import ApiError
from trt_kvcache.server.http.clients import Clients
from trt_kvcache.server.http.server_options import ServerOptions, is_loopback

#: Paths without a key: the health check, and the page, which asks for a key.
_OPEN = ("/", "/health")

#: A name or an address with an optional port. No URL parser is used: that of a proxy might find another host in the same text.
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z.-]+)(?::[0-9]{1,5})?")


class Guard:
    """Passes a request to the application, or refuses it. Sets ``request.state.client``, the name of the client."""

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app = app
        self._options = options
        self._keys = [key.encode() for key in options.api_keys]
        self._clients = Clients(options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, as an ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refused = self._refusal(scope)
        if refused is not None:
            await refused.response(scope, receive, send)
            return
        scope.setdefault("state", {})["client"] = self._clients.name(scope, self._key_number(scope))
        await self._app(scope, _LimitedBody(receive, self._options), send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        hosts = sum(name == b"host" for name, _ in scope["headers"])
        if hosts > 1:
            return ApiError(400, f"Host: expected one such header, got {hosts}.", code="wrong_host")
        if self._keys:
            if scope["path"] not in _OPEN and self._key_number(scope) is None:
                return ApiError(401, "expected a valid API key in the header Authorization: Bearer KEY.", code="invalid_api_key")
        elif not self._options.any_host and not _names_this_machine(headers.get(b"host", b"")):
            return ApiError(403, "expected a request to localhost: a server without API keys answers no other name.", code="wrong_host")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._options.max_body_bytes:
            return _too_long(self._options)
        return None

    def _key_number(self, scope: Scope) -> int | None:
        """Return the index of the API key in a request; None if there is no valid one."""
        kind, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        if kind.lower() != b"bearer":
            return None
        return next((number for number, key in enumerate(self._keys) if hmac.compare_digest(given.strip(), key)), None)


def _names_this_machine(host: bytes) -> bool:
    found = _HOST.fullmatch(host.decode("latin-1"))
    return found is not None and is_loopback(found[1])


def _too_long(options: ServerOptions) -> ApiError:
    return ApiError(413, f"body: expected at most {options.max_body_bytes} bytes, got more.", code="body_too_long")


class _LimitedBody:
    """Receives a body with limits of size and time. Later messages, such as a disconnect, have none."""

    def __init__(self, receive: Receive, options: ServerOptions) -> None:
        self._receive = receive
        self._options = options
        self._left = options.max_body_bytes
        self._ends = time.monotonic() + options.body_seconds
        self._complete = False

    async def __call__(self) -> Message:
        if self._complete:
            return await self._receive()
        try:
            message = await asyncio.wait_for(self._receive(), max(0.0, self._ends - time.monotonic()))
        except asyncio.TimeoutError:
            raise HTTPException(408, f"body: expected it within {self._options.body_seconds:g} seconds.") from None
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise HTTPException(413, _too_long(self._options).message)
        self._complete = not message.get("more_body", False)
        return message
