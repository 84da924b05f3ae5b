"""Health, models, statistics and metrics of a server, and the page that shows them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import HTMLResponse, JSONResponse, Response

from trt_kvcache.server.http.metrics import Metrics
from trt_kvcache.server.http.service import Service

_Function = TypeVar("_Function", bound=Callable[..., Any])

_PAGE = Path(__file__).with_name("page.html")

#: The page has inline styles and scripts, and connects to this server only.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'"


def _readable(router: APIRouter, path: str) -> Callable[[_Function], _Function]:
    """Return a decorator for a function that answers GET and HEAD."""

    def added(function: _Function) -> _Function:
        router.add_api_route(path, function, methods=["GET", "HEAD"], include_in_schema=False)
        return router.get(path)(function)  # never reached: only for /openapi.json, where two methods would need two names

    return added


def status_routes(service: Service, metrics: Metrics) -> APIRouter:
    """Return a router with ``/``, ``/health``, ``/stats``, ``/metrics`` and ``/v1/models``."""
    router = APIRouter()

    def described(name: str) -> dict[str, Any]:
        config = service.engine.config
        parent = {} if name == config.model else {"parent": config.model}
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "trt_kvcache",
            "max_model_len": config.context_length,
            **parent,
        }

    @_readable(router, "/health")
    async def health() -> JSONResponse:
        if service.engine.draining:
            return JSONResponse({"status": "draining"}, 503)
        return JSONResponse({"status": "ok"})

    @_readable(router, "/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [*map(described, service.models)]}

    @_readable(router, "/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return described(service.adapter_of(name) or service.model)

    @_readable(router, "/stats")
    async def stats() -> dict[str, Any]:
        return {"config": asdict(service.engine.config), **asdict(await service.engine.stats())}

    @_readable(router, "/metrics")
    async def prometheus() -> Response:
        text = metrics.text(service.engine.config, await service.engine.stats())
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @_readable(router, "/")
    async def page() -> HTMLResponse:
        headers = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
        return HTMLResponse(_PAGE.read_text(encoding="utf-8"), headers=headers)

    return router
