"""``make_app``: an ASGI application with OpenAI's API for an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from trt_kvcache import __version__
from trt_kvcache.server.engine_client import EngineClient
from trt_kvcache.server.http.api_errors import handle_errors
from trt_kvcache.server.http.chat_completions import chat_route
from trt_kvcache.server.http.completions import completions_route
from trt_kvcache.server.http.guard import Guard
from trt_kvcache.server.http.metrics import Metrics
from trt_kvcache.server.http.server_options import ServerOptions
from trt_kvcache.server.http.service import Service
from trt_kvcache.server.http.status import status_routes
from trt_kvcache.server.http.tokens import token_routes


def make_app(engine: EngineClient, options: ServerOptions | None = None, *, metrics: Metrics | None = None) -> FastAPI:
    """Return an ASGI application, which starts the engine with its lifespan and closes it at the end. ``metrics`` observes the engine."""
    allowed = options or ServerOptions()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await engine.start()
        await asyncio.to_thread(service.prepare)
        try:
            yield
        finally:
            service.close()
            await engine.cleanup()

    # FastAPI's pages of the API load scripts from other sites. /openapi.json remains.
    app = FastAPI(title="trt_kvcache", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    service = app.state.service = Service(engine, allowed)
    for router in (completions_route(service), chat_route(service), token_routes(service), status_routes(service, metrics or Metrics())):
        app.include_router(router)
    handle_errors(app)
    app.add_middleware(Guard, options=allowed)
    return app
