"""Attacks on a server in a process of its own: others are answered meanwhile, its memory comes back, and it says nothing of them.

Times and figures of the same attacks: ``benchmarks/server_attacks.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.server.needs_libraries import need_libraries

need_libraries()

from benchmarks.attacks.bodies import bodies  # noqa: E402
from benchmarks.attacks.headers import CONNECTIONS, DESCRIPTORS, HEAD, crowd, flood  # noqa: E402
from benchmarks.attacks.server import Attacked, attacked_server  # noqa: E402

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

#: Longest time that /health may take, in seconds: a machine with other work is slow, a loop that is held is slower.
WAIT = 2.0

#: MiB that an attack may leave behind.
LEFT = 100


@pytest.fixture(scope="module")
def server() -> Iterator[Attacked]:
    """A server with fewer descriptors than there are connections."""
    with attacked_server(descriptors=DESCRIPTORS) as one:
        one.ask("/v1/completions", {"prompt": "Alice was", "max_tokens": 2})
        yield one
        assert one.ask("/v1/completions", {"prompt": "Alice was", "max_tokens": 2})[0] == 200
        assert one.process.poll() is None
        assert one.said == []


def send(server: Attacked, step: int) -> None:
    """Send every ``step``-th body, and check that it is refused for what it is."""
    before = server.memory()
    with server.watched() as health:
        for name, path, make in list(bodies())[::step]:
            status, answer = server.ask(path, make())
            assert status == (200 if name == "spaces" else 400), (name, status, answer[:200])
            assert len(answer) < 2000, name
    assert (health.failed, health.longest < WAIT) == (0, True), health.longest
    assert server.memory() - before < LEFT


def test_bodies_of_four_mebibytes(server: Attacked):
    send(server, 6)


@pytest.mark.long
def test_all_bodies_of_four_mebibytes(server: Attacked):
    send(server, 1)


@pytest.mark.parametrize("sent", [b"GET /" + b"x" * 1000, b"GET / HTTP/1.1\r\nX: "], ids=["request line", "header"])
def test_request_lines_and_headers_of_38_mebibytes(server: Attacked, sent: bytes):
    before = server.memory()
    with server.watched() as health:
        assert flood(server, sent, b"x" * 1024, 38 << 20) == 431
    assert (health.failed, health.longest < WAIT) == (0, True), health.longest
    assert server.memory() - before < LEFT


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /hea", HEAD, HEAD + b"\r\n", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"],
    ids=["nothing", "half a line", "no end of headers", "no body", "answered"],
)
def test_300_connections_keep_nobody_out(server: Attacked, sent: bytes):
    with server.watched() as health:
        assert crowd(server, CONNECTIONS, sent)["others_answered"] == 20
    assert health.failed == 0
    assert health.answered
