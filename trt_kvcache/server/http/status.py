"""What a server says of itself: its health, its models, its metrics, and the page that shows them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import HTMLResponse, JSONResponse, Response

from trt_kvcache.server.http.metrics import Metrics
from trt_kvcache.server.http.service import Service

_PAGE = Path(__file__).with_name("page.html")

#: The page has its own styles and programs, and asks this server only.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'"


def status_routes(service: Service, metrics: Metrics) -> APIRouter:
    """Return the routes.

    Parameters
    ----------
    service : Service
        What answers.
    metrics : Metrics
        What was counted.

    Returns
    -------
    APIRouter
        With ``/``, ``/health``, ``/stats``, ``/metrics`` and ``/v1/models``.
    """
    router = APIRouter()

    def described() -> dict[str, Any]:
        config = service.engine.config
        return {
            "id": config.model,
            "object": "model",
            "created": service.created,
            "owned_by": "trt_kvcache",
            "max_model_len": config.context_length,
        }

    @router.get("/health")
    @router.head("/health", include_in_schema=False)
    async def health() -> JSONResponse:
        if service.engine.draining:
            return JSONResponse({"status": "draining"}, 503)
        return JSONResponse({"status": "ok"})

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [described()]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return described()

    @router.get("/stats")
    async def stats() -> dict[str, Any]:
        return {"config": asdict(service.engine.config), **asdict(await service.engine.stats())}

    @router.get("/metrics")
    async def prometheus() -> Response:
        text = metrics.text(service.engine.config, await service.engine.stats())
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @router.get("/")
    @router.head("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        headers = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
        return HTMLResponse(_PAGE.read_text(encoding="utf-8"), headers=headers)

    return router
