"""Many requests of all kinds at once, some of which are left: none is lost or mixed up, and memory does not grow."""

from __future__ import annotations

import asyncio
import gc
import random
import tracemalloc
from typing import Any

import httpx
import pytest

from tests.server.engines import read_all, source
from tests.server.http.running import NAME, Running, events_of, serving


def programs(count: int, seed: int) -> list[dict[str, Any]]:
    """Return requests of mixed length and sampling."""
    draw = random.Random(seed)
    found = []
    for index in range(count):
        prompt = [draw.randrange(3, 320) for _ in range(draw.randrange(1, 40))]
        body: dict[str, Any] = {"model": NAME, "prompt": prompt, "max_tokens": draw.randrange(1, 24), "ignore_eos": True}
        if index % 3:
            body |= {
                "temperature": draw.choice([0.5, 0.9, 1.3]),
                "seed": index,
                "top_k": draw.choice([0, 5]),
                "top_p": draw.choice([0.8, 1]),
            }
        if index % 5 == 0:
            body["frequency_penalty"] = 0.5
        if index % 7 == 0:
            body |= {"echo": True, "logprobs": 1}
        found.append({**body, "stream": index % 2 == 0})
    return found


def alone(bodies: list[dict[str, Any]]) -> list[str]:
    """Return the text of each without what runs beside it."""
    names = ("temperature", "seed", "top_k", "top_p", "frequency_penalty", "ignore_eos")
    with source(1)() as session:
        texts = []
        for body in bodies:
            options = {name: body[name] for name in names if name in body}
            text = read_all(session, body["prompt"], {"max_new_tokens": body["max_tokens"], **options})[1]
            echoed = session.tokenizer.decode(body["prompt"]) if body.get("echo") else ""
            texts.append(echoed + text)
        return texts


async def answered(client: httpx.AsyncClient, body: dict[str, Any], *, leave: bool) -> str | None:
    """Return the text of an answer; None if it was left."""
    if leave and not body["stream"]:
        try:
            await client.post("/v1/completions", json=body, timeout=0.02)
        except httpx.TimeoutException:
            return None
        return None
    if not body["stream"]:
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        [choice] = answer.json()["choices"]
        assert choice["finish_reason"] == "length"
        return choice["text"]
    async with client.stream("POST", "/v1/completions", json=body) as stream:
        assert stream.status_code == 200
        if leave:
            async for _ in stream.aiter_lines():
                break
            return None
        await stream.aread()
        return "".join(event["choices"][0]["text"] for event in events_of(stream))


def run_all(server: Running, bodies: list[dict[str, Any]], at_once: int) -> list[str | None]:
    """Send all, so many at once; of ten one is left."""

    async def main() -> list[str | None]:
        room = asyncio.Semaphore(at_once)
        limits = httpx.Limits(max_connections=at_once)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, trust_env=False, limits=limits) as client:

            async def one(index: int) -> str | None:
                async with room:
                    return await answered(client, bodies[index], leave=index % 10 == 9)

            return await asyncio.gather(*[one(index) for index in range(len(bodies))])

    return asyncio.run(main())


def check(count: int, *, rounds: int = 1, growth: int | None = None) -> None:
    """Send requests, in rounds; after the first, the memory of Python grows by ``growth`` bytes at most."""
    bodies = programs(count, seed=count)
    expected = alone(bodies)
    with serving(8, max_queue=200, prompt_cache_bytes=1 << 16) as server:
        sizes = []
        for _ in range(rounds):
            found = run_all(server, bodies, 48)
            server.wait_until_idle()
            wrong = [index for index, text in enumerate(found) if index % 10 != 9 and text != expected[index]]
            assert wrong == []
            if growth is not None:
                if not sizes:
                    tracemalloc.start()
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
        if growth is not None:
            tracemalloc.stop()
            assert sizes[-1] - sizes[1] < growth, sizes


def test_a_hundred_requests():
    check(100)


@pytest.mark.slow
def test_two_thousand_requests_and_flat_memory():
    check(500, rounds=4, growth=400_000)
