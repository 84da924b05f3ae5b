"""Grammars that crash llguidance, never end, or are slow: what their own requests get, and how long others wait meanwhile."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil

from .server import Attacked, attacked_server

#: Longest wait of /health in seconds; how much longer another's tokens take beside slow grammars; seconds after which hostile grammars are
#: answered, beyond those that they may compile; those of a chat beside grammars that never end; of a drain beyond what it may take.
LIMITS = {"health_s": 0.2, "beside_slow": 1.3, "answer_s": 20.0, "chat_s": 2.0, "end_s": 5.0, "workers_after_kill_s": 5.0}

ENDLESS = 99999989

#: Every mask takes longer than the one before.
SLOW = 'start: e\ne: e e e | e e | "a" | "b" | /./'


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def _grammar(text: str) -> dict[str, Any]:
    return {"type": "grammar", "grammar": text}


def grammars(*, quick: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each hostile grammar, and its ``response_format``."""
    for rules in (3000,) if quick else (300, 1000, 3000, 10_000):
        chain = "\n".join(["start: r0", *(f'r{index}: "a" r{index + 1}' for index in range(rules)), f'r{rules}: "b"'])
        yield f"{rules} chained rules", _grammar(chain)
    yield "multipleOf", _schema({"type": "integer", "multipleOf": ENDLESS})
    yield "refers to itself", _schema({"$ref": "#"})
    yield "no text fits", {"type": "regex", "regex": r"[^\s\S]"}
    yield "start: start", _grammar("start: start")
    if quick:
        return
    yield "5,000 optional properties", _schema({"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(5000)}})
    yield "3,000 of anyOf", _schema({"anyOf": [{"type": "string", "pattern": f"^a{index}.*b$"} for index in range(3000)]})
    yield "100,000 alternatives", _grammar("start: " + " | ".join(f'"a{index}"' for index in range(100_000)))
    yield "a text of 4 MiB", _grammar('start: "' + "a" * ((4 << 20) - 200) + '"')
    yield "a regex of 4 MiB", {"type": "regex", "regex": "(a|b)" * 800_000}
    for depth in (300, 10_000):
        yield f"{depth} parentheses", {"type": "regex", "regex": "(" * depth + "a" + ")" * depth}
        yield f"{depth} parentheses of rules", _grammar("start: " + "(" * depth + '"a"' + ")" * depth)
    yield "repeats of repeats", {"type": "regex", "regex": "((a{1,100}){1,100}){1,100}"}
    yield "a look-alike of many", {"type": "regex", "regex": "(.*a){20}" + ".{200}"}


def guided(format_: dict[str, Any], max_tokens: int = 8, **more: Any) -> dict[str, Any]:
    """Return a request with a ``response_format``."""
    return {"prompt": "Alice was", "max_tokens": max_tokens, "response_format": format_, **more}


def workers(server: Attacked) -> list[psutil.Process]:
    """Return the processes that a server has started."""
    return psutil.Process(server.pid).children(recursive=True)


def measure(*, quick: bool = False) -> dict[str, Any]:
    """Attack with each grammar, with several at once, and beside others; end servers meanwhile."""
    rows = [*_one_by_one(quick), _beside_slow(3 if quick else 7), _endless_at_once(signal.SIGTERM), _endless_at_once(signal.SIGKILL)]
    return {"limits": LIMITS, "rows": rows, "held": all(row["held"] for row in rows)}


def _one_by_one(quick: bool) -> Iterator[dict[str, Any]]:
    with attacked_server() as server:
        for name, format_ in grammars(quick=quick):
            with server.watched() as health:
                begin = time.perf_counter()
                status, body = server.ask("/v1/completions", guided(format_))
                answered = time.perf_counter() - begin
            said = json.loads(body)["error"]["message"][-160:] if status != 200 else ""
            held = status in (200, 400) and answered <= LIMITS["answer_s"] and health.longest <= LIMITS["health_s"]
            row = {"grammar": name, "status": status, "answer_s": round(answered, 2), "health_s": round(health.longest, 3)}
            yield {**row, "said": said, "memory_mib": round(server.memory()), "held": held}


def _seconds(server: Attacked, body: dict[str, Any], path: str = "/v1/completions") -> float:
    begin = time.perf_counter()
    status, answer = server.ask(path, body)
    assert status == 200, answer
    return time.perf_counter() - begin


@contextmanager
def _streams(server: Attacked, bodies: list[dict[str, Any]]) -> Iterator[list[int]]:
    """Ask for streams, and count the tokens of each, as long as the block lasts."""
    counts = [0] * len(bodies)

    def read(index: int, body: dict[str, Any]) -> None:
        connection = server.connect()
        stack.callback(connection.close)
        content = json.dumps({**body, "stream": True}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        connection.sendall(head.encode() + content)
        try:
            while data := connection.recv(65536):
                counts[index] += data.count(b"data: ")
        except OSError:
            pass

    with ExitStack() as stack:
        for index, body in enumerate(bodies):
            threading.Thread(target=read, args=(index, body), daemon=True).start()
        yield counts


def _beside_slow(repeats: int) -> dict[str, Any]:
    """Measure the tokens of another request alone, and beside three whose masks are slow."""
    plain = {"prompt": "The rabbit-hole", "max_tokens": 100, "ignore_eos": True}
    choice = guided(_grammar("start: /[a-z ]{100}/"), 100)
    with attacked_server() as server:
        _seconds(server, plain), _seconds(server, choice)
        alone = [_seconds(server, plain) for _ in range(repeats)]
        guided_alone = [_seconds(server, choice) for _ in range(repeats)]
        slow = guided(_grammar(SLOW), 480, ignore_eos=True, temperature=1.0)
        with _streams(server, [{**slow, "seed": index} for index in range(3)]) as counts:
            while min(counts) < 40:
                time.sleep(0.05)
            before = list(counts)
            beside = [_seconds(server, plain) for _ in range(repeats)]
            guided_beside = [_seconds(server, choice) for _ in range(repeats)]
            went_on = [after - first for after, first in zip(counts, before, strict=True)]
        alone += [_seconds(server, plain) for _ in range(repeats)]
    ratio = sorted(beside)[repeats // 2] / sorted(alone)[repeats]
    return {
        "beside": "three slow grammars",
        "alone_s": round(sorted(alone)[repeats], 3),
        "beside_s": round(sorted(beside)[repeats // 2], 3),
        "ratio": round(ratio, 2),
        "guided_ratio": round(sorted(guided_beside)[repeats // 2] / sorted(guided_alone)[repeats // 2], 2),
        "their_tokens_meanwhile": went_on,
        "held": ratio <= LIMITS["beside_slow"] and min(went_on) > 0,
    }


def _endless_at_once(ending: signal.Signals) -> dict[str, Any]:
    """Send six grammars that never end, ask for chats meanwhile, and end the server with a signal."""
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    with attacked_server("--drain-seconds", "3") as server, ExitStack() as stack:
        _seconds(server, chat, "/v1/chat/completions")
        endless = [guided(_schema({"type": "integer", "multipleOf": ENDLESS, "title": str(index)})) for index in range(6)]
        stack.enter_context(_streams(server, endless))
        time.sleep(1)
        chats = [_seconds(server, chat, "/v1/chat/completions") for _ in range(3)]
        started = workers(server)
        begin = time.perf_counter()
        server.process.send_signal(ending)
        server.process.wait(60)
        ended = time.perf_counter() - begin
        psutil.wait_procs(started, timeout=60)
        workers_ended = time.perf_counter() - begin - ended
    row = {"beside": "six multipleOf", "chat_s": round(max(chats), 3), "signal": ending.name, "end_s": round(ended, 2)}
    held = max(chats) <= LIMITS["chat_s"] and ended <= LIMITS["end_s"] and workers_ended <= LIMITS["workers_after_kill_s"]
    return {**row, "workers": len(started), "workers_after_s": round(workers_ended, 2), "held": held}
