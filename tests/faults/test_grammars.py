"""Grammars that are made to hurt: each costs its own request at most, and the others get what they get alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest

from tests.server.engines import alone, answers, request, run, running
from tests.server.guidance.grammars import CHAINED, CHOICE, ENDLESS, SLOW, guided
from tests.server.needs_libraries import need_libraries
from trt_kvcache.errors import ConfigError, ProcessorError
from trt_kvcache.server import AsyncEngine, GuidanceOptions

need_libraries("psutil")

STRICT = GuidanceOptions(compile_seconds=0.2, mask_seconds=0.1, memory_mib=128)
PLAIN = request([7, 8], 20)


def bombs() -> Iterator[dict[str, Any]]:
    """Yield regular expressions, schemas and Lark grammars that are deep, wide, long, or without end."""
    yield from (CHAINED, ENDLESS, SLOW)
    for size in (300, 3000, 30_000):
        yield {"regex": "(" * size + "a" + ")" * size}
        yield {"regex": "|".join(f"a{index}" for index in range(size))}
        yield {"regex": "a?" * size + "a" * size}
        yield {"regex": f"(a{{1,{size}}}){{1,{size}}}"}
        yield {"regex": f"(.*a){{{size // 10}}}.{{{size}}}"}
        yield {"choice": [f"a{index}" for index in range(size)]}
        yield {"choice": ["a" * size]}
        yield {"grammar": "start: " + "(" * size + '"a"' + ")" * size}
        yield {"grammar": "start: " + " | ".join(f'"a{index}"' for index in range(size))}
        yield {"grammar": "start: " + " ".join(["e"] * size) + '\ne: "a"?'}
        yield {"grammar": "\n".join(["start: r0", *(f"r{index}: r{index + 1} r{index + 1}" for index in range(size)), f'r{size}: "a"'])}
        yield {"json": _nested({"type": "array", "items": {}}, "items", size // 3)}
        yield {"json": {"anyOf": [{"type": "string", "pattern": f"^a{index}.*b$"} for index in range(size // 10)]}}
        yield {"json": {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(size // 3)}}}
        yield {"json": {"type": "string", "minLength": size, "maxLength": 10 * size}}
        yield {"json": {"enum": [f"a{index}" for index in range(size)]}}
    for schema in (
        {"$ref": "#"},
        {"$ref": "http://localhost/x"},
        {"type": "integer", "multipleOf": 1e-300},
        {"allOf": [{"$ref": "#"}] * 9},
    ):
        yield {"json": schema}


def _nested(schema: dict[str, Any], name: str, depth: int) -> dict[str, Any]:
    for _ in range(depth // 10):
        schema = {**schema, name: schema}
    return schema


async def outcome(engine: AsyncEngine, grammar: dict[str, Any]) -> str:
    """Return what became of a request with a grammar: it ends, with an answer or an error of its own."""
    try:
        [answer] = await asyncio.wait_for(answers(engine, guided(grammar, 4)), 60)
    except (ConfigError, ProcessorError) as error:
        return f"refused: {error}"
    return answer["finish_reason"]


@pytest.mark.parametrize("count", [8, pytest.param(60, marks=pytest.mark.long)])
def test_bombs_cost_their_own_request_only(count: int) -> None:
    chosen = list(bombs())[:count]
    room = asyncio.Semaphore(4)

    async def attack(engine: AsyncEngine, grammar: dict[str, Any]) -> str:
        async with room:
            return await outcome(engine, grammar)

    async def main() -> tuple[list[str], list[list[int]], list[int]]:
        async with running(4, guidance=STRICT) as engine:
            attacks = asyncio.gather(*[attack(engine, grammar) for grammar in chosen])
            others = [(await answers(engine, PLAIN))[0]["token_ids"] for _ in range(10)]
            found = await attacks
            [last] = await answers(engine, guided(CHOICE))
            assert last["finish_reason"] == "stop"
            assert engine.num_live == 0
            return found, others, (await answers(engine, PLAIN))[0]["token_ids"]

    found, others, last = run(main, 300)
    refused = [one for one in found if one.startswith("refused")]
    assert refused
    assert all("guided decoding: " in one and len(one) < 800 for one in refused)
    assert [*others, last] == [alone(PLAIN)[0]] * 11


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.long)])
def test_requests_that_leave_at_once_leave_nothing(count: int) -> None:
    chance = random.Random(5)
    grammars = [CHOICE, ENDLESS, SLOW, {"regex": "[a-z ]*"}, {"json": {"type": "object"}}]

    async def leave(engine: AsyncEngine) -> None:
        async with aclosing(engine.generate(guided(chance.choice(grammars), 60))) as chunks:
            task = asyncio.ensure_future(anext(chunks, None))
            await asyncio.wait([task], timeout=chance.choice([0, 0.001, 0.02]))
            task.cancel()
            await asyncio.wait([task])

    async def main() -> None:
        async with running(4, max_queue=64, guidance=STRICT) as engine:
            for _ in range(count // 20):
                await asyncio.gather(*[leave(engine) for _ in range(20)], return_exceptions=True)
            assert engine.num_live == 0
            [answer] = await answers(engine, guided(CHOICE))
            assert answer["finish_reason"] == "stop"
            pool = engine._guidance._pool  # type: ignore[union-attr]
            while any(lane.job for lane in pool._lanes):
                await asyncio.sleep(0.01)
            assert not pool._waiting
            assert len(pool._lanes) <= 4 + STRICT.max_compiles

    run(main, 300)
