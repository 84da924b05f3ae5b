"""``EngineReplica``: what each replica runs: a session of its own, behind an engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from trt_kvcache.errors import KVCacheError
from trt_kvcache.server.async_engine import AsyncEngine
from trt_kvcache.server.engine_stats import EngineConfig, EngineStats
from trt_kvcache.server.generate_request import GenerateChunk
from trt_kvcache.session.session import InferenceSession


class EngineReplica:
    """An :class:`~trt_kvcache.server.async_engine.AsyncEngine` as a class to be deployed."""

    async def __init__(self, source: Callable[[], InferenceSession], **options: Any) -> None:  # type: ignore[misc]
        self._engine = AsyncEngine(source, **options)
        await self._engine.start()

    async def config(self) -> EngineConfig:
        """Return what the engine of this replica is."""
        return self._engine.config

    async def stats(self) -> EngineStats:
        """Return what this replica does now."""
        return await self._engine.stats()

    async def generate(self, request: Mapping[str, Any]) -> AsyncGenerator[GenerateChunk | Exception, None]:
        """Answer a request. A caller that cancels it ends it."""
        try:
            async with aclosing(self._engine.generate(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except (KVCacheError, TimeoutError) as error:
            yield error

    async def check_health(self) -> None:
        """Ask the thread of the session; Ray replaces a replica that raises."""
        await self._engine.stats()

    async def __del__(self) -> None:
        """End all requests and close the session: Ray calls this when a replica is to end."""
        await self._engine.cleanup()
