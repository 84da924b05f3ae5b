"""Disconnects: a request ends as soon as its client has disconnected."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trt_kvcache.server.http.api_errors import ApiError

_T = TypeVar("_T")

#: Status in logs of an answer that nobody receives (as in nginx).
CLIENT_CLOSED_REQUEST = 499


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _ended(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Wait for a result; cancel the work if the client disconnects. The body of the request has been read."""
    working = asyncio.ensure_future(work)
    gone = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ApiError(CLIENT_CLOSED_REQUEST, "the client has gone away.")
    finally:
        await _ended(working, gone)


class EventStream(Response):
    """Server-sent events from a generator, which is closed if the client disconnects or stops reading."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], *, stalled_seconds: float) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first  # known before the status is sent, so an error before it has a status of its own
        self._events = events
        self._stalled_seconds = stalled_seconds  # a client that reads nothing for so long is disconnected
        self._sending_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, as an ASGI application."""
        sender = asyncio.create_task(self._send_all(send))
        gone = asyncio.create_task(_disconnected(receive))
        watch = asyncio.create_task(self._watch())
        try:
            await asyncio.wait({sender, gone, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _ended(sender, gone, watch)

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send(send, self._first)
            async for event in events:
                await self._send(send, event)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, event: bytes) -> None:
        self._sending_since = time.monotonic()
        await send({"type": "http.response.body", "body": event, "more_body": True})
        self._sending_since = None

    async def _watch(self) -> None:
        """Return when an event has waited too long to be sent."""
        while self._sending_since is None or time.monotonic() - self._sending_since < self._stalled_seconds:
            await asyncio.sleep(self._stalled_seconds / 4)


async def event_stream(request: Request, events: AsyncGenerator[bytes, None], *, stalled_seconds: float) -> EventStream:
    """Return a stream of events once the first event is there. Errors before it are raised."""

    async def first_event() -> bytes:
        return await anext(events)

    try:
        first = await unless_disconnected(request, first_event())
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events, stalled_seconds=stalled_seconds)
