"""Request lines and headers that are long or never end, and connections that send nothing: what they cost, and whether others get in."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

from .server import Attacked, attacked_server

#: Longest wait of /health in seconds, and MiB that the server may need more.
LIMITS = {"health_s": 0.2, "memory_mib": 20}

#: Open files of the server: fewer than there are connections.
DESCRIPTORS = 256

CONNECTIONS = 300

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n"


def status(connection: socket.socket) -> int | None:
    """Return the status of the last answer that comes before the connection is closed."""
    found = b""
    with suppress(OSError):
        while part := connection.recv(1 << 16):
            found = (found + part)[-(1 << 16) :]
    answers = re.findall(rb"HTTP/1\.1 (\d+) ", found)
    return int(answers[-1]) if answers else None


def flood(server: Attacked, begin: bytes, part: bytes, size: int) -> int | None:
    """Send a beginning and then a part over and over, until the server has had enough, and return the status of its answer."""
    with server.connect() as connection:
        with suppress(OSError):
            connection.sendall(begin)
            for _ in range(size // len(part) if part else 0):
                connection.sendall(part)
        return status(connection)


def trickle(server: Attacked, begin: bytes, pause: float, most: float) -> int | None:
    """Send a beginning and then a byte now and then, and return the status."""
    with server.connect() as connection:
        connection.sendall(begin)
        ends = time.monotonic() + most
        with suppress(OSError):
            while time.monotonic() < ends and not _readable(connection, pause):
                connection.sendall(b"x")
        return status(connection) if time.monotonic() < ends else None


def _readable(connection: socket.socket, seconds: float) -> bool:
    connection.settimeout(seconds)
    try:
        return bool(connection.recv(1, socket.MSG_PEEK)) or True
    except TimeoutError:
        return False
    finally:
        connection.settimeout(60)


def crowd(server: Attacked, count: int, sent: bytes) -> dict[str, int]:
    """Open connections that send a part of a request each, and count how many of others are answered beside them, one after the other."""
    with ExitStack() as stack:
        for _ in range(count):
            with suppress(OSError):
                connection = stack.enter_context(server.connect())
                connection.sendall(sent)
                if sent.endswith(b"\r\n\r\n") and sent.startswith(b"GET"):
                    connection.recv(1 << 16)
        answered = 0
        for _ in range(20):
            with suppress(OSError):
                answered += server.ask("/health", timeout=10)[0] == 200
    return {"others_answered": answered, "of": 20}


def attacks(quick: bool) -> Iterator[tuple[str, Callable[[Attacked], Any]]]:
    """Yield name and attack."""
    size = (1 if quick else 38) << 20
    line, kib = b"GET /" + b"x" * 1000, b"x" * 1024
    yield f"a request line of {size >> 20} MiB", lambda server: flood(server, line, kib, size)
    yield f"a header of {size >> 20} MiB", lambda server: flood(server, b"GET / HTTP/1.1\r\nX: ", kib, size)
    many = b"".join(b"X-%d: %s\r\n" % (number, kib) for number in range(64))
    yield f"headers of {size >> 17} MiB", lambda server: flood(server, b"GET / HTTP/1.1\r\n", many, size << 3)
    short = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + b"a:\r\n" * 16000 + b"\r\n"
    yield "16,000 headers in 64 KiB", lambda server: flood(server, short, b"", 1)
    count = 40 if quick else CONNECTIONS
    for name, sent in {
        "connections that send nothing": b"",
        "connections with half a request line": b"GET /hea",
        "connections without an end of headers": HEAD,
        "connections without a body": HEAD + b"\r\n",
        "connections that were answered": b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    }.items():
        yield f"{count} {name}", lambda server, s=sent: crowd(server, count, s)  # type: ignore[misc]
    if not quick:
        yield "a header of a byte a second", lambda server: trickle(server, b"GET / HTTP/1.1\r\nX: ", 1, 60)
        yield "a body of a byte a second", lambda server: trickle(server, HEAD + b"\r\n", 1, 60)


def measure(*, quick: bool = False) -> dict[str, Any]:
    """Attack one server, one attack after the other."""
    rows: list[dict[str, Any]] = []
    with attacked_server(descriptors=DESCRIPTORS) as server:
        server.ask("/v1/completions", {"prompt": "Alice was", "max_tokens": 4})
        for name, attack in attacks(quick):
            before = server.memory()
            server.forget_peak()
            begin = time.monotonic()
            with server.watched() as health:
                found = attack(server)
            rows.append(
                {
                    "attack": name,
                    **(found if isinstance(found, dict) else {"status": found}),
                    "seconds": round(time.monotonic() - begin, 2),
                    "health_s": round(health.longest, 3),
                    "health_failed": health.failed,
                    "more_memory_mib": round(server.memory("VmHWM") - before, 1),
                    "descriptors": server.descriptors(),
                }
            )
        log = len(server.said)
    held = all(
        row["health_s"] <= LIMITS["health_s"]
        and not row["health_failed"]
        and row["more_memory_mib"] <= LIMITS["memory_mib"]
        and row.get("others_answered", 20) == 20
        for row in rows
    )
    return {"limits": LIMITS, "descriptors": DESCRIPTORS, "log_lines": log, "rows": rows, "held": held and not log}
