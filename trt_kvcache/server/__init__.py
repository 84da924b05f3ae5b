"""One session for many clients: an engine for asyncio, and OpenAI's API over HTTP (``trt_kvcache.server.http``)."""

from trt_kvcache.server.async_engine import AsyncEngine, Context, RequestContext
from trt_kvcache.server.engine_stats import EngineConfig, EngineObserver, EngineStats, RequestRecord, SlotUse
from trt_kvcache.server.generate_request import GenerateChunk, GenerateRequest
from trt_kvcache.server.guidance import Guidance, GuidanceOptions, GuidedMask

__all__ = [
    "AsyncEngine",
    "Context",
    "EngineConfig",
    "EngineObserver",
    "EngineStats",
    "GenerateChunk",
    "GenerateRequest",
    "Guidance",
    "GuidanceOptions",
    "GuidedMask",
    "RequestContext",
    "RequestRecord",
    "SlotUse",
]
