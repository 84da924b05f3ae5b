"""OpenAI's API for an :class:`~trt_kvcache.server.async_engine.AsyncEngine`. Importing this package imports FastAPI."""

from trt_kvcache._util.extras import naming_the_extra

with naming_the_extra():
    import fastapi as _fastapi  # noqa: F401
    import prometheus_client as _prometheus_client  # noqa: F401
    import uvicorn as _uvicorn  # noqa: F401

from trt_kvcache.server.http.asgi import make_app
from trt_kvcache.server.http.server_options import ServerOptions

__all__ = ["ServerOptions", "make_app"]
