"""Reading the bodies of requests: with limits, and in a thread if they are long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import pydantic_core
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from trt_kvcache._util.freed_memory import return_freed_memory
from trt_kvcache.server.http.api_errors import ApiError, validation_error
from trt_kvcache.server.http.connection import CLIENT_CLOSED_REQUEST

_Model = TypeVar("_Model", bound=BaseModel)

#: Bytes of a body that is parsed in the event loop, in a millisecond or two.
_SHORT = 16 << 10

#: Most lists and objects in one body, and most members of all its objects. Each takes as long to parse as twenty numbers.
MAX_CONTAINERS, MAX_MEMBERS = 16384, 32768

#: Bytes of a body after which freed memory is returned to the system.
_LARGE = 256 << 10

_QUOTE = ord('"')


class BodyReader:
    """Reads bodies: short ones in the event loop, long ones one after the other in a thread."""

    def __init__(self, max_values: Callable[[], int]) -> None:
        self._max_values = max_values  # most JSON values of a body; the engine knows it after its start
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trt_kvcache bodies")

    async def read(self, request: Request, kind: type[_Model]) -> _Model:
        """Read, parse and validate the body of a request."""
        _check_headers(request)
        parts = []
        try:
            async for part in request.stream():
                parts.append(part)
        except ClientDisconnect:
            raise ApiError(CLIENT_CLOSED_REQUEST, "the client has gone away.") from None
        content = b"".join(parts).removeprefix(b"\xef\xbb\xbf")
        del parts
        if len(content) <= _SHORT:
            return parsed(content, kind, max_values=self._max_values())
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, lambda: parsed(content, kind, max_values=self._max_values()))
        finally:
            if len(content) > _LARGE:
                loop.call_later(0.05, self._thread.submit, return_freed_memory)

    def route(self) -> type[APIRoute]:
        """Return a class of routes that read their bodies with this reader."""
        read = self.read

        class BodyRoute(APIRoute):
            """A route whose body is validated before FastAPI gets it: FastAPI would parse it in the event loop."""

            def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
                handle = super().get_route_handler()
                assert self.body_field is not None
                kind: Any = self.body_field.field_info.annotation

                async def read_and_handle(request: Request) -> Response:
                    return await handle(_Read(request, await read(request, kind)))

                return read_and_handle

        return BodyRoute


class _Read(Request):
    """A request with a validated body."""

    def __init__(self, request: Request, found: BaseModel) -> None:
        super().__init__(request.scope, request.receive)
        self._body = b"read"
        self._found = found

    async def json(self) -> Any:
        """Return the validated body."""
        return self._found


def _check_headers(request: Request) -> None:
    kind = request.headers.get("content-type", "")
    if not _is_json(kind):
        got = repr(kind[:80]) if kind else "none"
        advice = "Send the header Content-Type: application/json."
        raise ApiError(415, f"Content-Type: expected application/json, got {got}. {advice}", code="unsupported_media_type")
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise ApiError(415, f"Content-Encoding: expected none, got {coding[:80]!r}. Send the body as it is.", code="unsupported_media_type")


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def parsed(content: bytes, kind: type[_Model], *, max_values: int) -> _Model:
    """Parse and validate a body."""
    if not content:
        raise ApiError(400, "body: expected a JSON object, got nothing.", code="invalid_json")
    for what, count, most in _sizes(content, max_values):
        if count > most:
            raise ApiError(400, f"body: expected at most {most} {what}, got {count}.", code="body_too_large")
    try:
        document = pydantic_core.from_json(content)
    except ValueError as error:
        raise ApiError(400, f"body: expected JSON, got an error: {error}.", code="invalid_json") from None
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False, include_input=False)) from None


def _sizes(content: bytes, max_values: int) -> list[tuple[str, int, int]]:
    """Return ``(name, count, limit)`` of containers, members and values in a JSON document.

    The count of all bytes is an upper bound; characters in texts are excluded only if that exceeds a limit.
    """

    def sizes(count: Callable[[bytes], int]) -> list[tuple[str, int, int]]:
        containers = count(b"[") + count(b"{")
        values, members = count(b",") + containers, count(b":")
        return [("lists and objects", containers, MAX_CONTAINERS), ("members", members, MAX_MEMBERS), ("values", values, max_values)]

    rough = sizes(content.count)
    if all(count <= most for _, count, most in rough):
        return rough
    characters = np.frombuffer(content.replace(rb"\\", b"  ").replace(rb"\"", b"  "), np.uint8)
    outside = ~np.logical_xor.accumulate(characters == _QUOTE)
    return sizes(lambda byte: int(np.count_nonzero(outside & (characters == ord(byte)))))
