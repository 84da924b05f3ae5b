"""Errors of OpenAI's API: a status, and a body with message, type, param and code."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from trt_kvcache.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    KVCacheError,
    ProcessorError,
    QueueFullError,
    RangeError,
    ShapeError,
)

_LOGGER = logging.getLogger("trt_kvcache.server")

#: Errors of the request itself. Any other error of the package is a failure of the server.
_OF_REQUEST = (ConfigError, RangeError, ShapeError, CapacityError, ProcessorError)

#: Beginning of errors about options with the name of a field.
_OPTION = re.compile(r"SamplingParams\.(\w+)[:\[]")

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}

#: Most validation errors of one body in an answer.
_SHOWN = 5


class ApiError(Exception):
    """An error answer. ``message`` is for people, ``code`` for programs, ``param`` is the field of the request."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,  # seconds
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """Body of the answer."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        """The answer, as a response."""
        headers = dict(self.headers)
        if self.retry_after is not None:
            headers["Retry-After"] = str(math.ceil(self.retry_after))
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers)


def as_api_error(error: BaseException) -> ApiError:
    """Return the error answer for an exception. Failures of the server are logged; their answer has no details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", retry_after=error.retry_after)
    if isinstance(error, _OF_REQUEST):
        text = str(error)
        option = _OPTION.match(text)
        return ApiError(
            400,
            text if option is None else text.removeprefix("SamplingParams."),
            param=None if option is None else option[1],
            code="context_length_exceeded" if isinstance(error, CapacityError) else None,
        )
    if isinstance(error, ClosedError):
        return ApiError(503, str(error), code="unavailable", retry_after=1)
    if isinstance(error, TimeoutError):
        return ApiError(503, str(error), code="timeout")
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
    _LOGGER.error("a request failed: %s: %s", type(error).__name__, error, exc_info=error if not isinstance(error, KVCacheError) else None)
    return ApiError(500, "the server failed; its log says why.", code="internal_error")


def validation_error(complaints: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return the error answer for validation errors of pydantic, of which it shows the first ones."""
    found = [_complaint(one) for one in complaints[:_SHOWN]]
    said = [f"{place or 'body'}: {text}" for place, text in found] + ["and more"] * (len(complaints) > _SHOWN)
    unknown = any(one["type"] == "extra_forbidden" for one in complaints)
    return ApiError(400, "; ".join(said) + ".", param=found[0][0] or None, code="unknown_field" if unknown else "invalid_value")


def _complaint(complaint: Mapping[str, Any]) -> tuple[str, str]:
    """Return the path of the field (empty for the whole body) and the message of a validation error."""
    # "=..." is not a field but the tag of a union (bodies._Prompt).
    parts = [f"{part!s:.80}" for part in complaint["loc"] if part not in ("body", "query", "path") and not str(part).startswith("=")]
    if complaint["type"] == "extra_forbidden":
        return ".".join(parts), "this field is not known"
    text = f"{complaint['msg']!s:.200}".removeprefix("Value error, ")
    if complaint["type"] == "value_error" and not parts and ": " in text:  # from a validator of several fields
        field, _, text = text.partition(": ")
        return field, text
    return ".".join(parts), text


def _of_route(request: Request, error: Exception) -> ApiError | None:
    """Return the error answer for an unknown path or method; None for any other error."""
    if not isinstance(error, HTTPException) or error.detail != HTTPStatus(error.status_code).phrase:
        return None
    asked = f"{request.method} {request.url.path[:80]}"
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = sorted((error.headers or {}).get("Allow", "").split(", "))
        return ApiError(405, f"{asked}: expected {' or '.join(allowed)}.", code="method_not_allowed", headers={"Allow": ", ".join(allowed)})
    if error.status_code == HTTPStatus.NOT_FOUND:
        return ApiError(404, f"{asked}: expected a path of this server, such as /v1/chat/completions; /openapi.json lists them.")
    return None


def handle_errors(app: FastAPI) -> None:
    """Install exception handlers, so that every error has this form."""

    async def of_body(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return validation_error(error.errors()).response

    async def of_any(request: Request, error: Exception) -> JSONResponse:
        return (_of_route(request, error) or as_api_error(error)).response

    app.add_exception_handler(RequestValidationError, of_body)
    for kind in (ApiError, KVCacheError, TimeoutError, HTTPException, Exception):
        app.add_exception_handler(kind, of_any)
