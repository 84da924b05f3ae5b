"""``EngineClient``: the engine that an API calls, in this process or elsewhere."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

from trt_kvcache.checkpoint import Tokenizer
from trt_kvcache.server.engine_stats import EngineConfig, EngineStats
from trt_kvcache.server.generate_request import GenerateChunk


class EngineClient(Protocol):
    """Answers requests. :class:`~trt_kvcache.server.async_engine.AsyncEngine` describes each member."""

    async def start(self) -> EngineConfig:
        """Start, and return the configuration."""

    @property
    def config(self) -> EngineConfig:
        """Configuration of the engine, or of each engine."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, if it has one."""

    @property
    def draining(self) -> bool:
        """True if it takes no new requests."""

    def generate(self, request: Mapping[str, Any]) -> AsyncGenerator[GenerateChunk, None]:
        """Answer a request."""

    async def stats(self) -> EngineStats:
        """Return the current statistics."""

    async def cleanup(self) -> None:
        """End all requests."""
