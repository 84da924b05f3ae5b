"""Answers of an engine to the prompts of one HTTP request, merged into one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

from trt_kvcache.errors import ClosedError
from trt_kvcache.server.engine_client import EngineClient
from trt_kvcache.server.generate_request import GenerateChunk


def extend(answer: GenerateChunk, chunk: GenerateChunk) -> None:
    """Append the next chunk of an answer: a whole answer is one chunk of all its tokens."""
    answer["text"] += chunk["text"]
    answer["token_ids"] += chunk["token_ids"]
    if "log_probs" in chunk:
        answer.setdefault("log_probs", []).extend(chunk["log_probs"])
        answer.setdefault("top_logprobs", []).extend(chunk["top_logprobs"])
    if "prompt_logprobs" in chunk:
        answer["prompt_logprobs"] = chunk["prompt_logprobs"]
    if "finish_reason" in chunk:
        answer["finish_reason"] = chunk["finish_reason"]
        answer["completion_usage"] = chunk["completion_usage"]


def size_of(chunk: GenerateChunk) -> int:
    """Return the number of tokens and log-probabilities in a chunk: a measure of the work to write it as JSON."""
    score = chunk.get("prompt_logprobs")
    tops = [*chunk.get("top_logprobs", ()), *(score.top_logprobs or () if score is not None else ())]
    return len(chunk["token_ids"]) + (0 if score is None else len(score.tokens)) + sum(len(top or ()) for top in tops)


@dataclass
class Usage:
    """Tokens of all answers to some prompts. A prompt counts once, with the fewest cached tokens of its answers."""

    prompts: dict[int, dict[str, Any]] = field(default_factory=dict)
    completion_tokens: int = 0

    def add(self, prompt: int, usage: Mapping[str, Any]) -> None:
        """Add one answer to the prompt of that number."""
        known = self.prompts.setdefault(prompt, dict(usage))
        self.prompts[prompt] = min(known, dict(usage), key=_cached)  # the answer that ran most of the prompt
        self.completion_tokens += usage["completion_tokens"]

    @property
    def document(self) -> dict[str, Any]:
        """The ``usage`` object of OpenAI's API."""
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


async def chunks_of(engine: EngineClient, requests: Sequence[Mapping[str, Any]]) -> AsyncGenerator[tuple[int, GenerateChunk], None]:
    """Yield the chunks of the answers to all requests, each with the index of its request. If one fails, the others are cancelled."""
    if len(requests) == 1:
        async with aclosing(engine.generate(requests[0])) as chunks:
            async for chunk in chunks:
                _raise_if_cancelled(chunk)
                yield 0, chunk
        return
    async with aclosing(_merged(engine, requests)) as merged:
        async for item in merged:
            yield item


def _raise_if_cancelled(chunk: GenerateChunk) -> None:
    """Raise ClosedError if the server has cancelled the answer: only one that ends does that."""
    if chunk.get("finish_reason") == "cancelled":
        raise ClosedError("this server is about to end: the answer was not complete in time. Try again later.")


async def _merged(engine: EngineClient, requests: Sequence[Mapping[str, Any]]) -> AsyncGenerator[tuple[int, GenerateChunk], None]:
    ready: asyncio.Queue[tuple[int, GenerateChunk] | None] = asyncio.Queue(maxsize=len(requests))

    async def pump(index: int) -> None:
        async with aclosing(engine.generate(requests[index])) as chunks:
            async for chunk in chunks:
                _raise_if_cancelled(chunk)
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


async def whole_answers(engine: EngineClient, requests: Sequence[Mapping[str, Any]]) -> tuple[list[list[GenerateChunk]], Usage]:
    """Wait for all answers; return the answers to each request."""
    found: list[dict[int, GenerateChunk]] = [{} for _ in requests]
    usage = Usage()
    async with aclosing(chunks_of(engine, requests)) as chunks:
        async for number, chunk in chunks:
            answer = found[number].setdefault(chunk["index"], GenerateChunk(index=chunk["index"], token_ids=[], text=""))
            extend(answer, chunk)
            if "completion_usage" in chunk:
                usage.add(number, chunk["completion_usage"])
    return [[answers[index] for index in sorted(answers)] for answers in found], usage
