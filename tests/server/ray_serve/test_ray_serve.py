"""Two replicas behind one address, as ``serve run`` starts them: who takes what, and what becomes of it when one dies."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import pytest

from tests.server.needs_ray import need_ray

need_ray()

from tests.server.engines import read_all, source  # noqa: E402
from tests.server.http.running import NAME, chat_model, events_of  # noqa: E402
from tests.server.ray_serve.cluster import SLOTS, Cluster, running  # noqa: E402

pytestmark = pytest.mark.slow

TOKENS = 400
LONG = {"model": NAME, "prompt": "Alice", "max_tokens": TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Two replicas. The tests share them; the last one kills one."""
    with running(tmp_path_factory.mktemp("ray")) as one:
        yield one


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    with source(1, max_sequence_length=500, dtype=None).replace(chat_model(tmp_path_factory.mktemp("alone") / "tiny"))() as one:
        yield one


def streamed(cluster: Cluster, **body: object) -> str:
    """Return the text of a stream."""
    with cluster.client() as client, client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        return "".join(event["choices"][0]["text"] for event in events_of(response))


#: Instead of the text of an answer that its replica was in the middle of when it died.
BROKEN_OFF = "the replica that ran this request has ended. Send it again."


def answered(cluster: Cluster, **body: object) -> str:
    """Return the text of a stream, or ``BROKEN_OFF``."""
    with cluster.client() as client, client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        lines = [line for line in response.iter_lines() if line]
    if lines[-1] != "data: [DONE]":
        assert BROKEN_OFF in lines[-1]
        return BROKEN_OFF
    return "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1])


def test_texts_are_those_of_the_session(cluster, session):
    bodies = [{"model": NAME, "prompt": f"The rabbit {i}", "max_tokens": 12, "temperature": 0.9, "seed": i} for i in range(12)]
    with ThreadPoolExecutor(12) as pool:
        texts = list(pool.map(lambda body: streamed(cluster, **body), bodies))
    options = [{"max_new_tokens": 12, "temperature": 0.9, "seed": body["seed"]} for body in bodies]
    assert texts == [read_all(session, body["prompt"], one)[1] for body, one in zip(bodies, options, strict=True)]


def test_prompts_of_one_request_are_answered_together(cluster, session):
    prompts = ["Alice", "The hat", "Down, down", "Off with", "Curiouser"]
    with cluster.client() as client:
        answer = client.post("/v1/completions", json={"prompt": prompts, "max_tokens": 6}).raise_for_status().json()
    assert [one["text"] for one in answer["choices"]] == [read_all(session, text, {"max_new_tokens": 6})[1] for text in prompts]


def test_clients_take_turns_in_each_replica(cluster):
    """Without names there would be one client in each of two queues."""

    seen = 0

    def ask(number: int) -> int:
        """Ask again and again, until enough clients have been seen to wait: however slowly requests come, all of them come."""
        transport = httpx.HTTPTransport(local_address=f"127.0.0.{1 + number % 2}")
        with httpx.Client(base_url=cluster.url, transport=transport, timeout=120) as client:
            while True:
                status = client.post("/v1/completions", json={**LONG, "prompt": f"{number} hats", "max_tokens": 100}).status_code
                if status != 200 or seen > 2 or time.monotonic() > end:
                    return status

    end = time.monotonic() + 120  # a limit for a test that fails
    with ThreadPoolExecutor(24) as pool:
        tasks = [pool.submit(ask, number) for number in range(24)]
        while not all(task.done() for task in tasks):
            seen = max(seen, cluster.stats()["waiting_clients"])
        assert {task.result() for task in tasks} == {200}
    assert seen > 2


def most_slots(cluster: Cluster) -> int:
    """Send more requests than there are slots, and return the most slots that were seen in use."""
    seen = 0
    with ThreadPoolExecutor(6 * SLOTS) as pool:
        texts = [pool.submit(streamed, cluster, **{**LONG, "prompt": f"{i} Alice"}) for i in range(6 * SLOTS)]
        while not all(text.done() for text in texts):
            seen = max(seen, len(cluster.stats()["slots"]))
        assert all(text.result() for text in texts)
    return seen


def test_both_replicas_take_requests(cluster):
    seen, end = 0, time.monotonic() + 60
    while seen <= SLOTS and time.monotonic() < end:  # a busy machine may look at the slots too rarely
        seen = max(seen, most_slots(cluster))
    assert SLOTS < seen <= 2 * SLOTS


def test_turns_of_a_chat_go_where_its_beginning_is(cluster):
    """All but a few: until the router hears that an answer has ended, its replica seems to have more to do than it has."""
    elsewhere = 0
    chats = [[{"role": "user", "content": f"{i} tell me all about the rabbit with the watch."}] for i in range(5)]
    ran_before = [0] * len(chats)
    for _ in range(4):
        for index, messages in enumerate(chats):
            with cluster.client() as client:
                body = {"messages": messages, "max_tokens": 8, "stop": "\n"}
                answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
            usage = answer["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            elsewhere += cached < ran_before[index]
            ran_before[index] = usage["prompt_tokens"]
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "And then?"}]
            messages[-2].pop("refusal")
            time.sleep(0.1)  # for the router to hear of it
    assert elsewhere <= 2, "of 15 turns that could be where their beginning is"


def test_a_request_that_is_wrong_is_refused_as_by_one_engine(cluster):
    with cluster.client() as client:
        answer = client.post("/v1/completions", json={"prompt": "Alice", "logit_bias": {"9999": 1}})
    assert answer.status_code == 400
    assert "expected an integer from 0 to 319, got 9999" in answer.json()["error"]["message"]


def test_a_client_that_goes_away_is_cancelled_in_its_replica(cluster):
    ran = cluster.stats()["session"]["decode_tokens"]
    count = 20

    def go_away(_: int) -> None:
        with suppress(httpx.ReadTimeout), cluster.client() as client:
            client.timeout = httpx.Timeout(120, read=0.3)
            with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
                assert next(response.iter_lines()).startswith("data: ")

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(go_away, range(count)))
    cluster.wait_until(lambda: not cluster.stats()["slots"] and not cluster.stats()["waiting"])
    assert cluster.stats()["session"]["decode_tokens"] - ran < count * TOKENS / 2


def test_metrics_are_those_of_all_replicas(cluster):
    with cluster.client() as client:
        text = client.get("/metrics").raise_for_status().text
    assert re.search(r'^trt_kvcache_requests_total\{finish_reason="length"\} \d', text, re.MULTILINE)
    ran = re.search(r"^trt_kvcache_decode_tokens_total (\S+)", text, re.MULTILINE)
    assert ran is not None
    assert float(ran[1]) == cluster.stats()["session"]["decode_tokens"] > 0


def test_a_replica_that_is_killed_is_replaced_and_requests_go_on(cluster, session):
    before = cluster.replicas()
    with ThreadPoolExecutor(1) as pool:
        killed = min(before)
        beside = pool.submit(lambda: [answered(cluster, prompt="Alice", max_tokens=5) for _ in range(20)])
        os.kill(killed, signal.SIGKILL)
        expected = read_all(session, "Alice", {"max_new_tokens": 5})[1]
        assert [text for text in beside.result() if text != BROKEN_OFF] == [expected] * (20 - beside.result().count(BROKEN_OFF))
        assert beside.result().count(BROKEN_OFF) <= 1, "the one that it was in the middle of"
    cluster.wait_until(lambda: len(cluster.replicas()) == 2)
    assert killed not in cluster.replicas()
    assert cluster.replicas() & before
    cluster.wait_until(lambda: most_slots(cluster) > SLOTS)
