"""One client of a server against another: many long requests, false addresses, slow conversations."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx

from tests.helpers.sessions import Pace
from tests.server.engines import answers, request, run, running
from tests.server.http.running import Running, chat_model, serving
from trt_kvcache.errors import QueueFullError

ATTACKER, OTHER = "127.0.0.1", "127.0.0.2"

LONG = {"prompt": [5, 6, 7], "max_tokens": 12, "ignore_eos": True}
SHORT = {"prompt": [8, 9], "max_tokens": 1, "ignore_eos": True}

SLOW = (
    "{% if messages[0].content == 'slow' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)


def post(server: Running, address: str, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> int:
    """Send a request from an address of this machine."""
    with httpx.Client(transport=httpx.HTTPTransport(local_address=address), base_url=server.url, timeout=120) as client:
        return client.post(path, json=body, headers=headers).status_code


def test_a_full_queue_of_one_client_neither_refuses_nor_delays_the_short_request_of_another():
    with serving(4, max_queue=64, max_sequence_length=128) as server, ThreadPoolExecutor(80) as threads:

        def attack(number: int) -> int:
            name = f"198.51.100.{number}"  # which counts for nothing
            return post(server, ATTACKER, "/v1/completions", LONG, {"X-Forwarded-For": name, "Forwarded": f"for={name}"})

        with server.held():
            sent: list[Future[int]] = [threads.submit(attack, number) for number in range(76)]
            server.wait_until(lambda now: now.waiting == 68 and sum(one.done() for one in sent) == 8)
            short = threads.submit(post, server, OTHER, "/v1/completions", SHORT)
            server.wait_until(lambda now: now.waiting == 69)
            server.pace.allow(1)
            server.wait_until(lambda now: len(now.slots) == 4)
            ended: list[int] = []
            short.add_done_callback(lambda _: ended.append(sum(one.done() and one.result() == 200 for one in sent)))
        assert short.result(120) == 200
        assert ended[0] <= 4 + 4  # those that run end in the same step, as may those that got their slots, before the answer has arrived
        assert sorted(one.result(120) for one in sent) == [200] * 68 + [429] * 8


def test_a_thousand_requests_of_one_client_leave_another_its_share():
    async def main():
        pace = Pace().hold()
        async with running(4, max_queue=64, pace=pace) as engine:
            many = [asyncio.create_task(answers(engine, {**request([5], 2), "client": "a"})) for _ in range(1000)]
            await asyncio.sleep(0)
            others = [asyncio.create_task(answers(engine, {**request([6], 1), "client": "b"})) for _ in range(34)]
            await asyncio.sleep(0)
            pace.go()
            return [
                sum(not isinstance(one, QueueFullError) for one in await asyncio.gather(*group, return_exceptions=True))
                for group in (many, others)
            ]

    assert run(main) == [68, 34]


def test_slow_conversations_hold_up_their_own_client_only(tmp_path):
    folder = chat_model(tmp_path / "tiny")
    (folder / "chat_template.jinja").write_text(SLOW)

    def chat(address: str, content: str) -> int:
        try:
            return post(server, address, "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], "max_tokens": 1})
        except (httpx.ConnectError, httpx.RemoteProtocolError):
            return 0  # a thread that a busy machine starts late finds the server gone, or sends nothing before the server closes

    with ThreadPoolExecutor(9) as threads, serving(2, folder=folder) as server:
        assert chat(OTHER, "Alice was") == 200
        slow = [threads.submit(chat, ATTACKER, "slow") for _ in range(8)]
        assert [chat(OTHER, "Alice was") for _ in range(3)] == [200] * 3
        assert not any(one.done() for one in slow)
        own = threads.submit(chat, ATTACKER, "Alice was")
        assert post(server, OTHER, "/v1/completions", SHORT) == 200
        assert not own.done()
        server.server.should_exit = True
        assert {one.result(60) for one in (*slow, own)} <= {503, 0}
