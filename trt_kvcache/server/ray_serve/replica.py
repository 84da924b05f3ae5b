"""``EngineReplica``: a replica with its own session."""

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
    """An :class:`~trt_kvcache.server.async_engine.AsyncEngine` as a deployment class of Ray Serve."""

    async def __init__(self, source: Callable[[], InferenceSession], **options: Any) -> None:  # type: ignore[misc]
        self._engine = AsyncEngine(source, **options)
        await self._engine.start()

    async def config(self) -> EngineConfig:
        """Return the configuration of the engine: the same for all replicas."""
        return self._engine.config

    async def stats(self) -> EngineStats:
        """Return the statistics of this replica."""
        return await self._engine.stats()

    async def generate(self, request: Mapping[str, Any]) -> AsyncGenerator[GenerateChunk | Exception, None]:
        """Answer a request; cancelling the call ends it. Errors of requests are yielded: Ray would log raised ones with their stack."""
        try:
            async with aclosing(self._engine.generate(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except (KVCacheError, TimeoutError) as error:
            yield error

    async def check_health(self) -> None:
        """Call the thread of the session. Ray replaces a replica that raises."""
        await self._engine.stats()

    async def __del__(self) -> None:
        """End all requests and close the session. Ray calls it at the end of a replica."""
        await self._engine.cleanup()
