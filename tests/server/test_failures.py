"""Several answers that fail at the same time, and engines that are closed under them: whoever asked is told, stderr is not."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.helpers.sessions import Pace
from tests.server.engines import answers, request, run, running, source
from trt_kvcache import AsyncSession
from trt_kvcache.errors import ClosedError, EngineError


def complaints(main: Callable[[], Awaitable[Any]]) -> list[str]:
    """Run a coroutine function; return what asyncio complains of while it runs and when all that is left of it is collected."""
    found: list[str] = []

    async def listening() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(str(context["message"])))
        await main()
        for _ in range(3):
            await asyncio.sleep(0)
            gc.collect()
        await asyncio.sleep(0)

    run(listening)
    return found


async def begun(engine, count: int) -> None:
    """Wait until so many answers run."""
    while len((await engine.stats()).slots) < count:
        await asyncio.sleep(0)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("answers_each", [1, 3])
def test_a_step_that_fails_fails_several_answers_quietly(steps, answers_each):
    async def main():
        pace = Pace().hold()
        async with running(6, pace=pace) as engine:
            tasks = [asyncio.create_task(answers(engine, request([5 + index], 60, n=answers_each))) for index in range(2)]
            if steps:
                pace.allow(steps)
                await begun(engine, 2 * answers_each)

            def fail(session):
                def step():
                    raise EngineError("planted")

                session.step = step

            await engine._thread.run(fail)
            pace.go()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert [str(error) for error in found] == ["planted"] * 2

    assert complaints(main) == []


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("answers_each", [1, 3])
def test_an_engine_that_is_closed_ends_several_answers_quietly(steps, answers_each):
    async def main():
        pace = Pace().hold()
        async with running(6, pace=pace) as engine:
            tasks = [asyncio.create_task(answers(engine, request([5 + index], 60, n=answers_each))) for index in range(2)]
            if steps:
                pace.allow(steps)
                await begun(engine, 2 * answers_each)
            else:
                await asyncio.sleep(0)
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(error) for error in found] == [ClosedError] * 2

    assert complaints(main) == []


def test_leaving_several_answers_while_they_fail_is_quiet():
    async def main():
        pace = Pace().hold()
        async with running(3, pace=pace) as engine:
            pace.allow(2)
            tasks = [asyncio.create_task(answers(engine, request([5], 60, n=3)))]
            await begun(engine, 3)
            tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    assert complaints(main) == []


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_session_that_is_closed_ends_what_waits_for_it_quietly(cancelled):
    async def main():
        served = AsyncSession(source(2), max_requests=4)
        await served.start()
        tasks = [asyncio.create_task(served.submit([5, 6], max_new_tokens=100, ignore_eos=True)) for _ in range(6)]
        tasks += [asyncio.create_task(served.run(lambda session: session.vocab_size)) for _ in range(2)]
        await asyncio.sleep(0)
        if cancelled:
            for task in tasks:
                task.cancel()
        await served.close()
        for task in tasks[4:6]:  # they wait for room, which nobody gives any more
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    assert complaints(main) == []
