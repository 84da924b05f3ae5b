"""Engines over the shipped model, and what a request should get."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

from tests.helpers.sessions import Pace
from tests.paths import ROOT
from trt_kvcache import InferenceSession
from trt_kvcache.server.async_engine import AsyncEngine, Context
from trt_kvcache.session.session_source import SessionSource

MODEL = ROOT / "examples" / "tiny-llama"

_T = TypeVar("_T")


def source(slots: int = 4, **options: Any) -> SessionSource:
    """Return where sessions over the shipped model come from."""
    given = {"max_batch_size": slots, "max_sequence_length": 128, "dtype": "float32", "max_logits_per_slot": "all", **options}
    return SessionSource(MODEL, engine="reference", **given)


@asynccontextmanager
async def running(
    slots: int = 4, *, max_queue: int = 64, max_seconds: float | None = None, pace: Pace | None = None, guidance: Any = None, **options: Any
) -> AsyncIterator[AsyncEngine]:
    """Run an engine over the shipped model."""
    opens = paced(source(slots, **options), pace or Pace())
    engine = AsyncEngine(opens, model="tiny", max_queue=max_queue, max_seconds=max_seconds, guidance=guidance)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.cleanup()


def paced(opens: Callable[[], InferenceSession], pace: Pace) -> Callable[[], InferenceSession]:
    """Return what opens a session of which the steps run when ``pace`` lets them."""
    return lambda: pace.attach(opens())


def run(main: Callable[[], Awaitable[_T]], seconds: float = 60) -> _T:
    """Run a coroutine function; whoever waits for ever fails the test."""

    async def limited() -> _T:
        return await asyncio.wait_for(main(), seconds)

    return asyncio.run(limited())


def request(prompt: list[int], max_tokens: int | None = 8, **sampling: Any) -> dict[str, Any]:
    """Return a request that does not end before its last token."""
    stopping = {"max_tokens": max_tokens, "ignore_eos": True}
    return {"token_ids": prompt, "sampling_options": sampling, "stop_conditions": stopping}


async def answers(engine: AsyncEngine, wanted: Mapping[str, Any], context: Context | None = None) -> list[dict[str, Any]]:
    """Return the answers to a request: tokens, text, log-probabilities, and what the last chunk says."""
    found: dict[int, dict[str, Any]] = {}
    async with aclosing(engine.generate(wanted, context)) as chunks:
        async for chunk in chunks:
            answer = found.setdefault(chunk["index"], {"token_ids": [], "text": "", "log_probs": [], "top_logprobs": []})
            assert "finish_reason" not in answer, "there is a chunk behind the last one"
            for name, value in chunk.items():
                answer[name] = answer[name] + value if name in ("token_ids", "text", "log_probs", "top_logprobs") else value
    return [found[index] for index in sorted(found)]


async def held_slots(engine: AsyncEngine) -> int:
    """Return how many slots are in use once the next step has begun."""
    return len([slot for slot in (await engine.stats()).slots if slot.state != "finished"])


def alone(wanted: Mapping[str, Any]) -> tuple[list[int], str]:
    """Return what ``session.generate`` makes of a request."""
    stopping = dict(wanted.get("stop_conditions", {}))
    options = {**wanted.get("sampling_options", {}), **stopping, "max_new_tokens": stopping.pop("max_tokens")}
    options.pop("max_tokens")
    with source(1)() as session:
        return read_all(session, wanted["token_ids"], options)


def read_all(session: InferenceSession, prompt: Any, options: Mapping[str, Any]) -> tuple[list[int], str]:
    """Return tokens and text of one answer."""
    events = list(session.generate(prompt, **options))
    return [event.token for event in events], "".join(event.text for event in events)
