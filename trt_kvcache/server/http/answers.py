"""The answers of an engine to the prompts of one HTTP request, together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

from trt_kvcache.generation.prompt_score import PromptScore
from trt_kvcache.server.engine import Engine
from trt_kvcache.server.generate_request import GenerateChunk


@dataclass
class Answer:
    """One whole answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top_logprobs: list[list[dict[str, Any]]] = field(default_factory=list)
    prompt_logprobs: PromptScore | None = None
    finish_reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """How many tokens and log-probabilities it has."""
        score = self.prompt_logprobs
        tops = [*self.top_logprobs, *(score.top_logprobs or () if score is not None else ())]
        return len(self.token_ids) + (0 if score is None else len(score.tokens)) + sum(len(top or ()) for top in tops)

    def add(self, chunk: GenerateChunk) -> None:
        """Add the next part of it."""
        self.text += chunk["text"]
        self.token_ids += chunk["token_ids"]
        self.log_probs += chunk.get("log_probs", [])
        self.top_logprobs += chunk.get("top_logprobs", [])
        self.prompt_logprobs = chunk.get("prompt_logprobs", self.prompt_logprobs)
        self.finish_reason = chunk.get("finish_reason", self.finish_reason)
        self.usage = chunk.get("completion_usage", self.usage)


@dataclass
class Usage:
    """What the answers to some prompts cost together: a prompt counts once, however many answers it has, as it did where most of it ran."""

    prompts: dict[int, dict[str, Any]] = field(default_factory=dict)
    completion_tokens: int = 0

    def add(self, prompt: int, usage: Mapping[str, Any]) -> None:
        """Add one answer to the prompt of that number."""
        known = self.prompts.setdefault(prompt, dict(usage))
        self.prompts[prompt] = min(known, dict(usage), key=_cached)
        self.completion_tokens += usage["completion_tokens"]

    @property
    def document(self) -> dict[str, Any]:
        """As OpenAI's API has it."""
        prompt = sum(usage["prompt_tokens"] for usage in self.prompts.values())
        cached = sum(map(_cached, self.prompts.values()))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def _cached(usage: Mapping[str, Any]) -> int:
    return int(usage["prompt_tokens_details"]["cached_tokens"])


async def chunks_of(engine: Engine, requests: Sequence[Mapping[str, Any]]) -> AsyncGenerator[tuple[int, GenerateChunk], None]:
    """Yield the chunks of the answers to all requests, each with the number of its request, as they come."""
    if len(requests) == 1:
        async with aclosing(engine.generate(requests[0])) as chunks:
            async for chunk in chunks:
                yield 0, chunk
        return
    async with aclosing(_merged(engine, requests)) as merged:
        async for item in merged:
            yield item


async def _merged(engine: Engine, requests: Sequence[Mapping[str, Any]]) -> AsyncGenerator[tuple[int, GenerateChunk], None]:
    ready: asyncio.Queue[tuple[int, GenerateChunk] | None] = asyncio.Queue(maxsize=len(requests))

    async def pump(index: int) -> None:
        async with aclosing(engine.generate(requests[index])) as chunks:
            async for chunk in chunks:
                await ready.put((index, chunk))

    async def pump_all() -> None:
        with suppress(Exception):  # raised below
            await asyncio.gather(*tasks)
        await ready.put(None)

    tasks = [asyncio.create_task(pump(index)) for index in range(len(requests))]
    ends = asyncio.create_task(pump_all())
    try:
        while (item := await ready.get()) is not None:
            yield item
        await asyncio.gather(*tasks)
    finally:
        for task in (*tasks, ends):
            task.cancel()
        await asyncio.gather(*tasks, ends, return_exceptions=True)


async def whole_answers(engine: Engine, requests: Sequence[Mapping[str, Any]]) -> tuple[list[list[Answer]], Usage]:
    """Wait for all answers."""
    found: list[dict[int, Answer]] = [{} for _ in requests]
    usage = Usage()
    async with aclosing(chunks_of(engine, requests)) as chunks:
        async for index, chunk in chunks:
            found[index].setdefault(chunk["index"], Answer()).add(chunk)
            if "completion_usage" in chunk:
                usage.add(index, chunk["completion_usage"])
    return [[of[choice] for choice in sorted(of)] for of in found], usage
