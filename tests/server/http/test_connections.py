"""Connections that send too much, too slowly, or nothing, before anybody has looked at a request."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import httpx
import pytest

from tests.server.http.running import Running, serving
from trt_kvcache.server.http import ServerOptions
from trt_kvcache.server.http.connections import Connections, Waits

BODY = b'{"prompt": "A", "max_tokens": 2}'
HEADERS = b"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n" % len(BODY)
ASKED = b"POST /v1/completions HTTP/1.1\r\n" + HEADERS + b"\r\n" + BODY
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def connect(server: Running) -> socket.socket:
    url = httpx.URL(server.url)
    return socket.create_connection((url.host, url.port), timeout=60)


def received(connection: socket.socket) -> bytes:
    """Return all that comes until the server closes the connection."""
    found = b""
    while part := connection.recv(1 << 16):
        found += part
    return found


def answer(server: Running, *sent: bytes) -> bytes:
    with connect(server) as connection:
        for part in sent:
            connection.sendall(part)
        return received(connection)


def error(answer: bytes, status: int) -> str:
    """Return the message of the last answer."""
    head, _, body = answer[answer.rindex(b"HTTP/1.1 ") :].partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    return json.loads(body)["error"]["message"]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(2, options=ServerOptions(header_seconds=1.0, body_seconds=1.0)) as one:
        yield one


@pytest.fixture
def crowded() -> Iterator[Running]:
    options = ServerOptions(max_connections=12, max_connections_without_headers=8)
    with serving(2, options=options) as one:
        yield one


@contextmanager
def half_open(server: Running, count: int, sent: bytes = b"GET") -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        found = []
        for _ in range(count):
            found.append(stack.enter_context(connect(server)))
            found[-1].sendall(sent)
        yield found


def is_answered(connection: socket.socket) -> bool:
    """Read the answer to ``HEALTH``."""
    found = b""
    while not found.endswith(b"}") and (part := connection.recv(1000)):
        found += part
    return found.startswith(b"HTTP/1.1 200")


def is_well(server: Running) -> bool:
    return answer(server, HEALTH[:-2] + b"Connection: close\r\n\r\n").startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(("length", "status"), [(65536, 200), (65537, 431)])
@pytest.mark.parametrize("where", [b"GET /health?%s HTTP/1.1\r\nHost: a\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: a\r\nX: %s\r\n\r\n"])
def test_request_line_and_headers_have_a_limit_to_the_byte(where, length, status):
    head = where % (b"x" * (length - len(where) + 2))
    with serving(1, options=ServerOptions(any_host=True)) as one, connect(one) as connection:
        connection.sendall(head)
        assert connection.recv(100).startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize(("lines", "status"), [(500, 200), (501, 431)])
def test_headers_have_a_limit_of_lines(server, lines, status):
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + b"a:\r\n" * (lines - 3) + b"\r\n"
    assert answer(server, head).startswith(b"HTTP/1.1 %d " % status)


def test_headers_that_are_too_long_are_refused_before_they_end(server):
    found = answer(server, b"GET / HTTP/1.1\r\n", *[b"X: %s\r\n" % (b"x" * 1000)] * 70)
    assert "at most 65536 bytes and 500 lines of request line and headers" in error(found, 431)


def test_a_second_request_has_the_same_limit(server):
    with connect(server) as connection:
        connection.sendall(HEALTH)
        assert is_answered(connection)
        connection.sendall(b"GET /" + b"x" * 66000)
        assert "request line and headers" in error(received(connection), 431)


@pytest.mark.parametrize("sent", [[], [b"GET / HT"], [HEALTH, b"G"]], ids=["nothing", "a part", "a second part"])
def test_headers_that_do_not_arrive_are_given_up(server, sent):
    found = answer(server, *sent)
    assert "within 1 seconds" in error(found, 408)


def test_headers_that_trickle_have_no_more_time(server):
    begin = time.monotonic()
    with connect(server) as connection:
        for byte in b"GET /health HTTP/1.1\r\n" + b"X: x\r\n" * 100:
            try:
                connection.sendall(bytes([byte]))
            except OSError:
                break
            time.sleep(0.05)
    assert 0.9 < time.monotonic() - begin < 20


def test_half_open_connections_keep_nobody_out(crowded):
    with half_open(crowded, 40):
        assert all(is_well(crowded) for _ in range(5))
    assert is_well(crowded)


def test_the_oldest_half_open_connection_of_an_address_makes_room(crowded):
    with half_open(crowded, 9) as found:
        assert "of one address" in error(received(found[0]), 503)
        found[1].sendall(HEALTH[3:])
        assert is_answered(found[1])


def test_connections_that_were_answered_are_no_half_open_ones(crowded):
    with half_open(crowded, 10, HEALTH) as found:
        assert all(is_answered(one) for one in found)
        for one in found:
            one.sendall(HEALTH)
        assert all(is_answered(one) for one in found)


def test_the_oldest_idle_connection_makes_room(crowded):
    with half_open(crowded, 12, HEALTH) as found:
        assert all(is_answered(one) for one in found)
        assert is_well(crowded)
        assert received(found[0]) == b""
        found[1].sendall(HEALTH)
        assert is_answered(found[1])


def test_bodies_that_do_not_come_keep_nobody_out(crowded):
    with half_open(crowded, 30, ASKED[:-1]):
        assert is_well(crowded)


class Noted:
    def __init__(self, address: str) -> None:
        self.address, self.reason = address, ""

    def make_room(self, reason: str, *, at_once: bool) -> None:
        self.reason = reason


def test_a_connection_with_an_answer_to_come_is_never_closed_for_others():
    connections, answering, further = Connections(2, 2), [Noted("a"), Noted("b")], Noted("c")
    for one in answering:
        connections.set(one, Waits.ANSWER)
    connections.set(further, Waits.HEADERS)
    assert [one.reason for one in answering] == ["", ""]
    assert "at most 2 at once" in further.reason
    assert len(connections) == 2


def test_an_address_of_ipv6_is_its_first_half():
    connections = Connections(9, 1)
    first, second, other = Noted("2001:db8::1"), Noted("2001:db8::2"), Noted("2001:db8:0:1::1")
    for one in (first, second, other):
        connections.set(one, Waits.HEADERS)
    assert [bool(one.reason) for one in (first, second, other)] == [True, False, False]


@pytest.mark.parametrize("path", [b"/health", b"/v1/completions"])
def test_a_client_that_closes_its_sending_side_gets_its_answer(server, path):
    with connect(server) as connection:
        connection.sendall(ASKED if path != b"/health" else HEALTH)
        connection.shutdown(socket.SHUT_WR)
        found = received(connection)
    assert b"HTTP/1.1 200 OK" in found
    assert found.endswith(b"}")


def test_an_answer_that_comes_before_the_end_of_its_body_does_not_keep_the_connection(server):
    with connect(server) as connection:
        connection.sendall(b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\nx")
        assert connection.recv(1000).startswith(b"HTTP/1.1 404")
        begin = time.monotonic()
        with suppress(ConnectionError):
            while time.monotonic() - begin < 20:
                connection.sendall(b"x")
                time.sleep(0.1)
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b\x00\r\n\r\n",
        b"\x16\x03\x01 no HTTP\r\n\r\n",
        ASKED[:-1].replace(b"Content-Length: 32", b"Transfer-Encoding: chunked").replace(BODY[:-1], b"zz\r\n"),
    ],
    ids=["two hosts", "a fold with NUL", "TLS", "a wrong chunk"],
)
def test_bytes_that_are_no_request_are_400_with_a_reason(server, sent):
    assert "request: expected a request of HTTP/1.1, got an error" in error(answer(server, sent), 400)


def test_a_client_that_has_gone_is_dropped_without_an_error(server: Running):
    def gone_then_refused() -> None:
        """Close the client and refuse its connection before the loop can see the end: the kernel resets it while the answer is sent."""
        connection.close()
        (protocol,) = server.server.server_state.connections
        protocol.make_room("full", at_once=False)

    server.wait_until(lambda _: not server.server.server_state.connections)
    connection = connect(server)
    connection.sendall(b"GET")
    server.wait_until(lambda _: len(server.server.server_state.connections) == 1)
    server.call(gone_then_refused)
    server.wait_until(lambda _: not server.server.server_state.connections)
