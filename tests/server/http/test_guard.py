"""Keys, names of the host, sizes and times of bodies, and sockets that other machines reach."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.helpers.assertions import raises
from tests.server.http.running import Running, serving
from trt_kvcache.errors import ConfigError
from trt_kvcache.server.http.guard import Guard
from trt_kvcache.server.http.server_options import ServerOptions
from trt_kvcache.server.http.serving import address_of, bound_socket

BODY = {"prompt": "A", "max_tokens": 1}


def test_a_request_needs_one_of_the_keys():
    with serving(1, options=ServerOptions(api_keys=("first", "second"))) as server, server.client() as client:
        for path in ("/v1/models", "/metrics", "/stats", "/openapi.json"):
            for key in ("", "Bearer", "Bearer third", "Bearer firs", "Bearer first2", "Basic first", "first"):
                answer = client.get(path, headers={"Authorization": key})
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
            for key in ("Bearer first", "bearer second"):
                assert client.get(path, headers={"Authorization": key}).status_code == 200
        assert client.post("/v1/completions", json=BODY).status_code == 401
        assert client.post("/v1/completions", json=BODY, headers={"Authorization": "Bearer first"}).status_code == 200
        assert [client.get(path).status_code for path in ("/", "/health")] == [200, 200]
        assert client.get("/health", headers={"Host": "example.org"}).status_code == 200


def test_without_keys_only_names_of_this_machine_are_answered():
    with serving(1) as server, server.client() as client:
        for host in ("example.org", "example.org:8000", "localhost.example.org", "192.168.0.1", "", "127.0.0.1@example.org", "[::1"):
            answer = client.get("/v1/models", headers={"Host": host})
            assert answer.status_code == 403, host
            assert answer.json()["error"]["code"] == "wrong_host"
        for host in ("evil.com@localhost", "localhost/evil.com", "localhost?evil.com", "localhost#a", "loc\talhost", "localhost:", ":80"):
            assert client.get("/v1/models", headers={"Host": host}).status_code == 403, host
        for host in ("localhost", "LOCALHOST:8000", "127.0.0.1", "127.1.2.3:1", "[::1]:8000"):
            assert client.get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("options", [ServerOptions(), ServerOptions(api_keys=("key",))], ids=["without keys", "with keys"])
def test_two_host_lines_are_refused_whoever_reads_them_first(options):
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": "/health", "headers": [(b"host", b"example.org"), (b"host", b"localhost")]}
    asyncio.run(Guard(None, options)(scope, None, send))
    assert (sent[0]["status"], b"expected one such header, got 2" in sent[1]["body"]) == (400, True)


def test_any_host_may_be_allowed():
    with serving(1, options=ServerOptions(any_host=True)) as server, server.client() as client:
        assert client.get("/v1/models", headers={"Host": "example.org"}).status_code == 200


def test_a_body_has_a_limit_of_bytes_said_or_not():
    with serving(1, options=ServerOptions(max_body_bytes=1000)) as server, server.client() as client:
        long = b'{"prompt": "' + b"a" * 1000 + b'"}'
        kind = {"Content-Type": "application/json"}
        for content in (long, iter([long[:600], long[600:]])):
            answer = client.post("/v1/completions", content=content, headers=kind)
            assert answer.status_code == 413
            assert "expected at most 1000 bytes" in answer.json()["error"]["message"]
        assert client.post("/v1/completions", json=BODY).status_code == 200


def test_a_body_that_does_not_arrive_is_given_up():
    with serving(1, options=ServerOptions(body_seconds=0.2)) as server:
        host, port = httpx.URL(server.url).host, httpx.URL(server.url).port
        with socket.create_connection((host, port), timeout=30) as slow:
            slow.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
            )
            assert slow.recv(100).startswith(b"HTTP/1.1 408")


def test_a_prompt_has_a_limit_of_tokens():
    with serving(1, options=ServerOptions(max_prompt_tokens=3)) as server, server.client() as client:
        assert client.post("/v1/completions", json={**BODY, "prompt": [5] * 3}).status_code == 200
        answer = client.post("/v1/completions", json={**BODY, "prompt": [5] * 4})
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, "prompt: expected at most 3 tokens, got 4.")


def test_a_request_has_a_limit_of_time():
    with serving(1, max_seconds=0.05) as server, server.client() as client:
        body = {"prompt": "A", "max_tokens": 120, "n": 8, "ignore_eos": True, "temperature": 1}
        with server.held(steps=3):
            answer = client.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "timeout")
        server.wait_until_idle()


def test_a_full_queue_is_429_and_says_when_to_try_again():
    with serving(1, max_queue=1, max_sequence_length=512) as server, server.client() as client:
        body = {"prompt": "A", "max_tokens": 500, "stream": True, "ignore_eos": True, "n": 2}
        with server.held(steps=3), client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()  # while it lives, the stream is open
            next(lines)
            answer = client.post("/v1/completions", json=BODY)
            assert answer.status_code == 429
            assert answer.json()["error"]["type"] == "rate_limit_error"
            assert int(answer.headers["retry-after"]) >= 1
            assert b"trt_kvcache_requests_refused_total 1.0" in client.get("/metrics").content
        server.wait_until_idle()
        assert client.post("/v1/completions", json=BODY).status_code == 200


def test_a_server_that_drains_takes_nothing_new():
    with serving(1) as server, server.client() as client:
        client.get("/health")
        server.engine._draining = True
        answer = client.post("/v1/completions", json=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert "retry-after" in answer.headers
        assert client.get("/health").status_code == 503


def test_requests_that_do_not_end_while_a_server_drains_end_with_an_error(caplog: pytest.LogCaptureFixture):
    body = {"prompt": "A", "max_tokens": 50, "ignore_eos": True}
    with serving(4, drain_seconds=0.2) as server, ThreadPoolExecutor(2) as clients, server.client() as client:
        server.pace.hold()
        server.pace.allow(3)
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            waiting = [clients.submit(ask, server, {**body, "prompt": prompt}) for prompt in ("B", ["C", "D"])]
            while server.engine.num_live < 4:
                time.sleep(0.005)
            server.server.should_exit = True
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        answers = [one.result(10) for one in waiting]
        server.pace.go()
    assert events[-1]["error"]["code"] == "unavailable"
    for answer in answers:
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert "not complete in time" in answer.json()["error"]["message"]
    assert not [record for record in caplog.records if record.exc_info]


def ask(server: Running, body: dict[str, Any]) -> httpx.Response:
    with server.client() as client:
        return client.post("/v1/completions", json=body)


def test_small_events_are_not_held_back():
    with bound_socket("127.0.0.1", 0, ServerOptions()) as bound:
        assert bound.proto == socket.IPPROTO_TCP, "asyncio sets TCP_NODELAY for these only"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.org"])
def test_other_machines_need_a_key(host: str):
    with raises(ConfigError, "host", expected="127.0.0.1"):
        bound_socket(host, 0, ServerOptions())


def test_other_machines_may_be_served_with_a_key_or_on_purpose():
    for options in (ServerOptions(api_keys=("key",)), ServerOptions(any_host=True)):
        with bound_socket("0.0.0.0", 0, options) as bound:
            assert address_of(bound).startswith("http://0.0.0.0:")


def test_a_port_that_is_taken_is_named():
    with bound_socket("127.0.0.1", 0, ServerOptions()) as first:
        port = first.getsockname()[1]
        with raises(ConfigError, "port", expected="free", got=port):
            bound_socket("127.0.0.1", port, ServerOptions())
    with pytest.raises(OSError, match=r"192\.0\.2\.1:8000"):  # an address of nobody
        bound_socket("192.0.2.1", 8000, ServerOptions(any_host=True))


@pytest.mark.long
def test_a_slow_reader_is_cut_off_and_holds_nobody_up():
    with serving(2, options=ServerOptions(stalled_seconds=0.5), max_sequence_length=512) as server, server.client() as client:
        host, port = httpx.URL(server.url).host, httpx.URL(server.url).port
        body = b'{"prompt": "A", "max_tokens": 500, "stream": true, "ignore_eos": true, "logprobs": 20, "n": 12}'
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            slow.connect((host, port))
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            slow.sendall(head.encode() + body)
            server.wait_until(lambda now: len(now.slots) == 2)
            answer = client.post("/v1/completions", json=BODY)
            assert answer.status_code in (200, 429)
            ends = time.monotonic() + 60
            while server.engine.num_live:
                assert time.monotonic() < ends
                time.sleep(0.01)
            slow.settimeout(30)
            found = b""
            while part := slow.recv(1 << 20):
                found += part
        assert found.startswith(b"HTTP/1.1 200")
        assert b"[DONE]" not in found
        assert client.post("/v1/completions", json=BODY).status_code == 200
