"""Conversations are rendered side by side, in turns between clients, and not any more when a server ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.engines import run
from tests.server.needs_libraries import need_libraries

need_libraries()

from trt_kvcache.checkpoint.template_processes import MAX_PROCESSES  # noqa: E402
from trt_kvcache.errors import ClosedError, QueueFullError  # noqa: E402
from trt_kvcache.server.http.rendering import Rendering  # noqa: E402


class Slow:
    """Texts that are rendered when a test lets them."""

    def __init__(self, max_queue: int = 20) -> None:
        self.rendering = Rendering(max_queue)
        self.begun: list[str] = []
        self._may = threading.Semaphore(0)

    def begin(self, client: str, count: int = 1) -> list[asyncio.Task[str]]:
        return [asyncio.create_task(self.rendering.run(client, self._render(client))) for _ in range(count)]

    def _render(self, client: str) -> Callable[[], str]:
        def render() -> str:
            self.begun.append(client)
            assert self._may.acquire(timeout=60)
            return client

        return render

    async def wait(self, count: int) -> None:
        """Wait until so many have begun, and a moment longer."""
        while len(self.begun) < count:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)

    async def finish(self, *tasks: asyncio.Task[str]) -> list[Any]:
        for _ in range(200):
            self._may.release()
        return await asyncio.gather(*tasks, return_exceptions=True)

    def let(self, count: int) -> None:
        for _ in range(count):
            self._may.release()

    def check_nothing_is_left(self) -> None:
        assert (self.rendering._running, self.rendering._taken, len(self.rendering._waiting)) == ({}, {}, 0)


def test_a_client_with_slow_texts_never_has_all_places():
    async def main():
        slow = Slow()
        many = slow.begin("a", 10)
        await slow.wait(MAX_PROCESSES - 1)
        assert slow.begun == ["a"] * (MAX_PROCESSES - 1)
        other = slow.begin("b", 2)
        await slow.wait(MAX_PROCESSES)
        assert slow.begun[-1] == "b"
        await slow.finish(*many, *other)
        await asyncio.sleep(0.01)
        slow.check_nothing_is_left()

    run(main)


def test_texts_are_rendered_in_turns():
    async def main():
        slow = Slow()
        tasks = slow.begin("a", 6)
        await slow.wait(3)
        tasks += slow.begin("b", 3) + slow.begin("c", 2)
        await slow.wait(4)
        assert slow.begun == ["a", "a", "a", "b"]
        slow.let(2)
        await slow.wait(5)
        assert slow.begun[4] == "c"
        await slow.finish(*tasks)
        assert sorted(slow.begun) == [*"aaaaaabbbcc"]

    run(main)


def test_each_client_has_its_share_of_those_that_may_wait():
    async def main():
        slow = Slow(max_queue=4)
        tasks = slow.begin("a", 20) + slow.begin("b", 20)
        await slow.wait(4)
        found = await slow.finish(*tasks)
        return [sum(not isinstance(one, QueueFullError) for one in part) for part in (found[:20], found[20:])]

    assert run(main) == [MAX_PROCESSES + 4, (MAX_PROCESSES + 4) // 2]


def test_one_that_is_cancelled_leaves_the_queue_and_one_that_runs_keeps_its_place():
    async def main():
        slow = Slow()
        tasks = slow.begin("a", 3) + slow.begin("b", 1)
        await slow.wait(4)
        waits = slow.begin("c", 5)
        await asyncio.sleep(0)
        for task in (*waits, tasks[0]):
            task.cancel()
        await asyncio.gather(*waits, tasks[0], return_exceptions=True)
        assert (len(slow.rendering._waiting), slow.rendering._running.total()) == (0, 4)
        late = slow.begin("d")
        await asyncio.sleep(0.01)
        assert "d" not in slow.begun
        assert (await slow.finish(*late)) == ["d"]
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.01)
        slow.check_nothing_is_left()

    run(main)


def test_a_close_refuses_those_that_wait():
    async def main():
        slow = Slow()
        tasks = slow.begin("a", 3) + slow.begin("b", 1)
        await slow.wait(4)
        waits = slow.begin("a", 3)
        await asyncio.sleep(0)
        slow.rendering.close()
        found = await asyncio.gather(*waits, *slow.begin("c"), return_exceptions=True)
        assert [type(one) for one in found] == [ClosedError] * 4
        assert await slow.finish(*tasks) == ["a", "a", "a", "b"]
        await asyncio.sleep(0.01)
        slow.check_nothing_is_left()

    run(main)


def test_an_error_of_a_text_is_that_of_its_caller():
    def refuse() -> str:
        raise ValueError("no")

    async def main():
        rendering = Rendering(0)
        for _ in range(9):
            with pytest.raises(ValueError, match="no"):
                await rendering.run("a", refuse)
            await asyncio.sleep(0.01)
        assert await rendering.run("a", lambda: "text") == "text"

    run(main)
