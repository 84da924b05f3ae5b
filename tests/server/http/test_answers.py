"""The answers to several prompts of one request, merged: what they share ends with the one who reads them."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from types import SimpleNamespace

import pytest

from tests.server.engines import run
from tests.server.needs_libraries import need_libraries

need_libraries()

from trt_kvcache.server.http.answers import chunks_of  # noqa: E402

REQUESTS = [{"sampling_options": {"n": 1}, "name": name} for name in "abc"]


class Endless:
    """Answers each request without an end, or fails at a chunk of one of them."""

    config = SimpleNamespace(max_num_seqs=4, max_queue=4)

    def __init__(self, fails_at=None):
        self.fails_at = fails_at
        self.live = set()
        self.made = 0

    async def generate(self, request):
        name = request["name"]
        self.live.add(name)
        try:
            for number in range(1000):
                if (name, number) == self.fails_at:
                    raise ValueError(f"{name} at {number}")
                self.made += 1
                yield {"index": 0, "token_ids": [number]}
                await asyncio.sleep(0)
        finally:
            self.live.remove(name)


@pytest.mark.parametrize("passes", [0, 1, 3, 9])
def test_leaving_ends_all_of_them_however_many_chunks_wait(passes):
    async def main():
        engine = Endless()
        async with aclosing(chunks_of(engine, REQUESTS)) as chunks:
            await anext(chunks)
            for _ in range(passes):  # the more, the fuller is what lies between; at last it is full
                await asyncio.sleep(0)
        assert engine.live == set()
        assert engine.made < 20

    run(main)


def test_a_task_that_is_cancelled_ends_all_of_them():
    async def main():
        engine = Endless()

        async def read():
            async with aclosing(chunks_of(engine, REQUESTS)) as chunks:
                async for _ in chunks:
                    await asyncio.sleep(0.001)  # slower than they come

        task = asyncio.create_task(read())
        while engine.made < 12:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert engine.live == set()

    run(main)


@pytest.mark.parametrize("number", [0, 1, 5])
def test_what_one_raises_ends_the_others(number):
    async def main():
        engine = Endless(fails_at=("b", number))
        found = []

        async def read():
            async with aclosing(chunks_of(engine, REQUESTS)) as chunks:
                async for item in chunks:
                    found.append(item)

        with pytest.raises(ValueError, match=f"b at {number}"):
            await read()
        assert engine.live == set()
        assert [chunk["token_ids"] for index, chunk in found if index == 1] == [[one] for one in range(number)]

    run(main)
