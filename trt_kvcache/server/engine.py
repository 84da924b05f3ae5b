"""``Engine``: what an API needs of one engine, or of several that answer as one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

from trt_kvcache.checkpoint import Tokenizer
from trt_kvcache.server.engine_stats import EngineConfig, EngineStats
from trt_kvcache.server.generate_request import GenerateChunk


class Engine(Protocol):
    """Answers requests: :class:`~trt_kvcache.server.async_engine.AsyncEngine` describes each member."""

    async def start(self) -> EngineConfig:
        """Begin, and return what it is."""

    @property
    def config(self) -> EngineConfig:
        """What it is."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, if it has one."""

    @property
    def draining(self) -> bool:
        """Whether it takes no new requests."""

    def generate(self, request: Mapping[str, Any]) -> AsyncGenerator[GenerateChunk, None]:
        """Answer a request."""

    async def stats(self) -> EngineStats:
        """Return what it does now."""

    async def cleanup(self) -> None:
        """End."""
