"""One client against another: its many long requests, false addresses and slow conversations, and how long the server then takes to end."""

from __future__ import annotations

import http.client
import json
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Event
from typing import Any

from .server import Attacked, attacked_server

SLOTS, QUEUE = 4, 64

#: Requests of the attacker that may end while another client's short one waits; how many more tokens one of two busy clients may get;
#: seconds that a conversation waits beside slow ones, and that a server takes to end beside them.
LIMITS = {"ended_before": SLOTS, "times_as_many_tokens": 1.25, "chat_s": 2.0, "end_s": 5.0}

#: The addresses of two clients.
ATTACKER, OTHER = "127.0.0.1", "127.0.0.2"

#: A template that does not end for one text.
SLOW = (
    "{% if messages[0].content == 'slow' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)

LONG = {"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True}
SHORT = {"prompt": [8, 9], "max_tokens": 1, "ignore_eos": True}


def ask(server: Attacked, address: str, path: str, body: Any, headers: dict[str, str] | None = None) -> int:
    """Send a request from an address of this machine; return the status of its answer, 0 without one."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=300, source_address=(address, 0))
    try:
        connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def _stats(server: Attacked) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(server.ask("/stats")[1])
    return found


def _statuses(sent: list[Future[int]]) -> Counter[int]:
    return Counter(one.result() for one in sent if one.done())


@contextmanager
def _many(server: Attacked, count: int, *, header: bool = False) -> Iterator[list[Future[int]]]:
    """Send so many long requests of the attacker at once, as long as the block lasts; each with another address in a header, if so."""
    with ThreadPoolExecutor(count) as threads:
        names = [{"X-Forwarded-For": f"198.51.100.{number}", "Forwarded": f"for=198.51.100.{number}"} for number in range(count)]
        sent = [threads.submit(ask, server, ATTACKER, "/v1/completions", LONG, names[number] if header else {}) for number in range(count)]
        while _stats(server)["waiting"] < min(count - SLOTS, QUEUE):
            time.sleep(0.05)
        try:
            yield sent
        finally:
            server.process.kill()  # the threads end with it


def beside_many(count: int, *, header: bool) -> dict[str, Any]:
    """Have the attacker fill the queue, and another client send a short request."""
    with attacked_server(slots=SLOTS) as server, _many(server, count, header=header) as sent:
        begin, ended = time.perf_counter(), _statuses(sent)[200]
        status = ask(server, OTHER, "/v1/completions", SHORT)
        found = _statuses(sent)
        row = {"status": status, "waited_s": round(time.perf_counter() - begin, 3), "ended_before": found[200] - ended}
        refused = found[429]
    name = "many long requests" + (", each with another address in a header" if header else "")
    held = status == 200 and row["ended_before"] <= LIMITS["ended_before"]
    return {"attack": name, "requests": count, "refused": refused, **row, "held": held}


def two_busy(seconds: float, count: int) -> dict[str, Any]:
    """Have the attacker keep so many requests in the queue, and another client as many as there are slots; count what ends."""
    ended, stop = Counter[str](), Event()
    body = {**LONG, "max_tokens": 40}

    def keep_asking(server: Attacked, address: str) -> None:
        while not stop.is_set():
            if ask(server, address, "/v1/completions", body) == 200 and not stop.is_set():
                ended[address] += 1

    with attacked_server(slots=SLOTS) as server, ThreadPoolExecutor(count + SLOTS) as threads:
        for _ in range(count):
            threads.submit(keep_asking, server, ATTACKER)
        while _stats(server)["waiting"] < count - SLOTS:
            time.sleep(0.05)
        for _ in range(SLOTS):
            threads.submit(keep_asking, server, OTHER)
        time.sleep(seconds / 4)  # until each has its slots
        ended.clear()
        time.sleep(seconds)
        found = dict(ended)
        stop.set()
    row = {"answers": {"attacker": found.get(ATTACKER, 0), "other": found.get(OTHER, 0)}}
    ratio = max(found.values(), default=0) / max(1, min(found.get(ATTACKER, 0), found.get(OTHER, 0)))
    return {"attack": "two busy clients", "requests": count, **row, "held": ratio <= LIMITS["times_as_many_tokens"]}


def slow_chats(count: int) -> dict[str, Any]:
    """Have the attacker send conversations whose template does not end, another client one, and the server end."""
    chat: dict[str, Any] = {"max_tokens": 1, "messages": [{"role": "user", "content": "slow"}]}
    other = {**chat, "messages": [{"role": "user", "content": "Alice was"}]}
    with attacked_server(slots=SLOTS, template=SLOW) as server, ThreadPoolExecutor(count) as threads:
        ask(server, OTHER, "/v1/chat/completions", other)
        sent = [threads.submit(ask, server, ATTACKER, "/v1/chat/completions", chat) for _ in range(count)]
        time.sleep(1)
        waits, statuses = [], []
        for _ in range(5):
            begin = time.perf_counter()
            statuses.append(ask(server, OTHER, "/v1/chat/completions", other))
            waits.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        server.process.send_signal(signal.SIGTERM)
        code = server.process.wait(60)
        row = {"status": max(statuses), "waited_s": round(max(waits), 3), "end_s": round(time.perf_counter() - begin, 3), "exit_code": code}
        wait(sent)
    held = set(statuses) == {200} and row["waited_s"] <= LIMITS["chat_s"] and row["end_s"] <= LIMITS["end_s"] and code == 0
    return {"attack": "slow conversations, and SIGTERM", "requests": count, **row, "held": held}


def measure(*, quick: bool = False) -> dict[str, Any]:
    """Attack a server in each of these ways."""
    count = 20 if quick else 200
    rows = [
        beside_many(count, header=False),
        beside_many(count, header=True),
        two_busy(2 if quick else 10, 20 if quick else 60),
        slow_chats(8 if quick else 40),
    ]
    return {"limits": LIMITS, "rows": rows, "held": all(row["held"] for row in rows)}
