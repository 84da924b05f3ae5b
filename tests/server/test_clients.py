"""Clients of one engine: each has its share of the queue, and slots go round between them."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tests.helpers.assertions import raises
from tests.helpers.sessions import Pace
from tests.server.engines import alone, answers, request, run, running
from trt_kvcache.errors import ClosedError, ConfigError, QueueFullError


def of(client: str, prompt: list[int], max_tokens: int = 8, **sampling: Any) -> dict[str, Any]:
    return {**request(prompt, max_tokens, **sampling), "client": client}


def begin(engine, client: str, count: int, max_tokens: int = 8) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(answers(engine, of(client, [5 + index % 50], max_tokens))) for index in range(count)]


async def room(engine, client: str, most: int = 100) -> int:
    """Fill what a client has room for; return how many of its requests were taken."""
    tasks = begin(engine, client, most)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    taken = [task for task in tasks if not task.done()]
    for task in tasks:
        if task.done():
            assert isinstance(task.exception(), QueueFullError)
    return len(taken)


async def end(engine) -> None:
    """Cancel what is left."""
    await engine.drain(0)


@pytest.mark.parametrize(
    ("slots", "queue", "taken"),
    [
        (1, 64, [65, 32, 21, 16]),
        (4, 4, [8, 4, 2, 2, 1, 1, 1, 1, 0, 0]),
        (1, 1, [2, 1, 0]),
        (4, 0, [4, 0]),
        (1, 0, [1, 0]),
        (2, 1, [3, 1, 1, 0]),
    ],
)
def test_each_client_has_its_share_of_a_queue_that_is_full(slots, queue, taken):
    async def main():
        async with running(slots, max_queue=queue, pace=Pace().hold()) as engine:
            found = [await room(engine, f"client {number}") for number in range(len(taken))]
            await end(engine)
            return found

    assert run(main) == taken


def test_a_client_alone_has_the_whole_queue_and_so_has_one_request():
    async def main():
        async with running(2, max_queue=6, pace=Pace().hold()) as engine:
            task = asyncio.create_task(answers(engine, of("a", [5], n=8)))
            await asyncio.sleep(0)
            assert engine.num_live == 8
            assert await room(engine, "b") == 4
            await end(engine)
            await task

    run(main)


def test_a_client_that_was_alone_gets_no_further_place_before_it_has_less_than_its_share():
    async def main():
        pace = Pace().hold()
        async with running(1, max_queue=7, pace=pace) as engine:
            first = begin(engine, "a", 8, max_tokens=1)
            await asyncio.sleep(0)
            [other] = begin(engine, "b", 1, max_tokens=1)
            await asyncio.sleep(0)
            with pytest.raises(QueueFullError, match="room for 1 more of 8 requests, got 0"):
                await answers(engine, of("a", [9]))
            pace.go()
            await asyncio.gather(*first, other)
            assert len((await answers(engine, of("a", [9])))[0]["token_ids"]) == 8

    run(main)


def test_another_client_waits_for_those_that_run_only():
    ended = []

    async def main():
        pace = Pace().hold()
        async with running(2, max_queue=100, pace=pace) as engine:
            many = begin(engine, "a", 30, max_tokens=12)
            for task in many:
                task.add_done_callback(lambda _: ended.append("a"))
            while (await engine.stats()).waiting < 30:
                await asyncio.sleep(0)
            pace.allow(3)
            while len((await engine.stats()).slots) < 2:
                await asyncio.sleep(0)
            [short] = begin(engine, "b", 1, max_tokens=1)
            short.add_done_callback(lambda _: ended.append("b"))
            while (await engine.stats()).waiting_clients < 2:
                await asyncio.sleep(0)
            pace.go()
            await asyncio.gather(short, *many)

    run(main)
    assert ended.index("b") <= 2


def test_a_refusal_says_when_this_client_has_room():
    async def main():
        async with running(2, max_queue=18, pace=Pace().hold()) as engine:
            engine._mean_seconds = 10.0
            await room(engine, "a")
            await room(engine, "b", 3)
            found = []
            for client, n in (("a", 1), ("b", 8), ("c", 20)):
                with pytest.raises(QueueFullError) as caught:
                    await answers(engine, of(client, [5], n=n))
                found.append(caught.value.retry_after)
            await end(engine)
            return found

    # a: 4 of all 23 have to end. b: one of its own, of which every second slot is. c: 23 + 20 - 20 of all.
    assert run(main) == [20.0, 10.0, 115.0]


def test_a_thousand_names_leave_nothing_and_take_no_more_than_the_queue():
    async def main():
        pace = Pace().hold()
        async with running(2, max_queue=6, pace=pace) as engine:
            tasks = [task for number in range(1000) for task in begin(engine, f"name {number}", 1, max_tokens=1)]
            await asyncio.sleep(0)
            assert engine.num_live == 8
            pace.go()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert sum(not isinstance(one, QueueFullError) for one in found) == 8
            assert engine._live == {}

    run(main)


def test_a_client_that_cancels_in_a_loop_keeps_no_place():
    async def main():
        async with running(1, max_queue=4, pace=Pace().hold()) as engine:
            for _ in range(200):
                tasks = begin(engine, "a", 5)
                await asyncio.sleep(0)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            assert await room(engine, "b") == 5
            await end(engine)

    run(main)


def test_a_drain_ends_with_many_clients_waiting():
    async def main():
        pace = Pace().hold()
        async with running(2, max_queue=30, pace=pace) as engine:
            tasks = [task for number in range(16) for task in begin(engine, f"client {number}", 2, max_tokens=2)]
            await asyncio.sleep(0)
            drain = asyncio.create_task(engine.drain())
            await asyncio.sleep(0)
            with pytest.raises(ClosedError):
                await answers(engine, of("late", [5]))
            pace.go()
            await drain
            assert [len(answer["token_ids"]) for [answer] in await asyncio.gather(*tasks)] == [2] * 32

    run(main)


@pytest.mark.parametrize("client", [3, "x" * 257, ["a"]])
def test_a_name_that_is_no_short_text_is_refused(client):
    async def main():
        async with running(1) as engine:
            with raises(ConfigError, "client", expected="text of at most 256 characters"):
                await answers(engine, {**request([5]), "client": client})
            assert engine.num_live == 0

    run(main)


def test_random_clients_get_what_they_get_alone():
    chance = random.Random(5)
    wanted = [
        of(
            chance.choice("abcd"),
            [chance.randrange(3, 300) for _ in range(1 + number)],
            chance.randrange(1, 8),
            seed=number,
            temperature=1.2,
        )
        for number in range(30)
    ]

    async def main():
        async with running(3, max_queue=40) as engine:
            tasks = [asyncio.create_task(answers(engine, one)) for one in wanted]
            for task in tasks[::9]:
                await asyncio.sleep(0.001)
                task.cancel()
            return await asyncio.gather(*tasks, return_exceptions=True)

    for number, (one, found) in enumerate(zip(wanted, run(main), strict=True)):
        if number % 9:
            assert found[0]["token_ids"] == alone(one)[0]
