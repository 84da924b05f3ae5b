"""Clients that go away: their slots are free within a step, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from tests.server.engines import read_all, source
from tests.server.http.running import NAME, Running, serving

LONG = {"prompt": "A", "max_tokens": 500, "ignore_eos": True, "temperature": 1.0, "seed": 1}

#: Seeds from here on draw no token so close to a border between two that the order of sums, which depends on the batch, decides.
SEED = 100


@pytest.fixture
def one_slot():
    with serving(1, max_sequence_length=512) as server:
        yield server


@contextmanager
def asked(server: Running, **body: Any) -> Iterator[None]:
    """Ask, without reading the answer, and go away at the end of the block."""
    content = json.dumps({**LONG, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port), timeout=60) as connection:
        connection.sendall(head.encode() + content)
        yield


def test_a_stream_that_is_left_frees_its_slot_at_once(one_slot: Running):
    with one_slot.held(steps=3), one_slot.client() as client:
        with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
        one_slot.wait_until(lambda _: not one_slot.engine.num_live)
    one_slot.wait_until_idle()
    assert one_slot.stats().session.decode_steps < 3, "it went on"


def test_an_answer_that_nobody_waits_for_frees_its_slot_at_once(one_slot: Running):
    with one_slot.held(steps=3):
        with asked(one_slot):
            one_slot.wait_until(lambda now: now.slots)
        one_slot.wait_until(lambda _: not one_slot.engine.num_live)
    one_slot.wait_until_idle()
    assert one_slot.stats().session.decode_steps < 3, "it went on"


def test_one_that_waits_in_the_queue_leaves_it(one_slot: Running):
    with one_slot.held(steps=3), asked(one_slot, stream=True, n=16):
        one_slot.wait_until(lambda _: one_slot.engine.num_live == 16)
        for streamed in (True, False):
            with asked(one_slot, stream=streamed, n=3):
                one_slot.wait_until(lambda _: one_slot.engine.num_live == 19)
            one_slot.wait_until(lambda _: one_slot.engine.num_live == 16)


def test_all_prompts_of_a_request_end_with_it(one_slot: Running):
    with one_slot.held(steps=3), one_slot.client() as client:
        with client.stream("POST", "/v1/completions", json={**LONG, "prompt": ["A", "B", "C"], "n": 2, "stream": True}) as stream:
            lines = stream.iter_lines()  # while it lives, the stream is open
            next(lines)
            assert one_slot.engine.num_live == 6
        one_slot.wait_until(lambda _: not one_slot.engine.num_live)
    one_slot.wait_until_idle()
    assert one_slot.stats().session.decode_steps < 3, "they went on"


def test_the_client_of_openai_closes_streams_and_others_get_what_they_get_alone():
    with source(1, max_sequence_length=512)() as session:
        expected = [
            read_all(session, f"Alice {index}", {"max_new_tokens": 30, "temperature": 0.9, "seed": SEED + index})[1] for index in range(32)
        ]

    async def one(client, index):
        stream = await client.completions.create(
            model=NAME, prompt=f"Alice {index}", max_tokens=30, temperature=0.9, seed=SEED + index, stream=True
        )
        text = ""
        async with stream:
            async for part in stream:
                text += part.choices[0].text
                if index % 4 == 3:
                    return text
        return text

    async def main(url):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            return await asyncio.gather(*[one(client, index) for index in range(32)])

    with serving(8, max_sequence_length=512) as server:
        found = asyncio.run(main(server.url))
        server.wait_until_idle()
    for index, (text, whole) in enumerate(zip(found, expected, strict=True)):
        assert (whole.startswith(text) and text) if index % 4 == 3 else text == whole


def test_the_end_of_a_server_does_not_wait_for_idle_clients():
    with serving(1) as server:
        idle = server.client()
        idle.get("/health")
    idle.close()
    assert not [thread for thread in threading.enumerate() if thread.name in ("server of a test", "trt_kvcache session")]
