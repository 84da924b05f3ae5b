"""Bodies of 4 MiB that are costly to read: how long ``/health`` waits, and what memory they take and leave.

``measure(quick=...)`` of this module, as of each one beside it, returns ``{"limits": {...}, "rows": [{...}, ...], "held": bool}``.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from .server import Attacked, attacked_server

#: Longest wait of /health in seconds, and MiB of memory that a body may leave behind.
LIMITS = {"health_s": 0.2, "memory_left_mib": 100}

#: Bytes of each body: the default limit.
SIZE = 4 << 20


def _filled(before: str, element: str, after: str, size: int, *, first: str = "") -> bytes:
    """Return a body with as many elements as fit."""
    count = (size - len(before) - len(first) - len(after)) // (len(element) + 1)
    return f"{before}{first}{','.join([element] * count)}{after}".encode()


def _numbered(before: str, element: Callable[[int], str], after: str, size: int) -> bytes:
    parts, length = [], len(before) + len(after)
    for number in range(size):
        parts.append(element(number))
        length += len(parts[-1]) + 1
        if length > size:
            break
    return f"{before}{','.join(parts[:-1])}{after}".encode()


def bodies(size: int = SIZE) -> Iterator[tuple[str, str, Callable[[], bytes]]]:
    """Yield name, path and maker of each body."""
    completions, chat, user = "/v1/completions", "/v1/chat/completions", '"messages":[{"role":"user","content":"a"}]'
    lists = {
        "texts": ('"a"', ""),
        "a text, then zeros": ("0", '"a",'),
        "a zero, then nulls": ("null", "0,"),
        "a list, then empty lists": ("[]", "[1],"),
        "lists of one token": ("[1]", ""),
        "tokens": ("1", ""),
        "objects": ("{}", ""),
        "nulls": ("null", ""),
    }
    for name, (element, first) in lists.items():
        yield f"prompt: {name}", completions, lambda e=element, f=first: _filled('{"prompt":[', e, "]}", size, first=f)
    for element, name in (("null", "nulls"), ("{}", "objects"), ("[]", "lists"), ("1", "tokens")):
        yield f"tokens: {name}", "/detokenize", lambda e=element: _filled('{"tokens":[', e, "]}", size)
        yield f"messages: {name}", chat, lambda e=element: _filled('{"messages":[', e, "]}", size)
        yield f"tools: {name}", chat, lambda e=element: _filled(f'{{{user},"tools":[', e, "]}", size)
        yield f"unknown field: {name}", chat, lambda e=element: _filled(f'{{{user},"x":[', e, "]}", size)
        yield (
            f"a schema: {name}",
            completions,
            lambda e=element: _filled(
                '{"prompt":"a","response_format":{"type":"json_schema","json_schema":{"schema":{"enum":[', e, "]}}}}", size
            ),
        )
        yield f"of a message: {name}", chat, lambda e=element: _filled('{"messages":[{"role":"user","content":"a","x":[', e, "]}]}", size)
    yield "messages: whole", chat, lambda: _filled('{"messages":[', '{"role":"user","content":""}', "]}", size)
    yield "parts of a message", chat, lambda: _filled('{"messages":[{"role":"user","content":[', "{}", "]}]}", size)
    for name, path, before in (("completions", completions, '{"prompt":"'), ("tokenize", "/tokenize", '{"prompt":"')):
        for kind, text in (("words", "the rabbit "), ("one letter", "a"), ("spaces", " "), ("escapes", "\\u00e9"), ("digits", "7")):
            yield f"text of {kind}: {name}", path, lambda b=before, t=text: (b + t * ((size - 20) // len(t)) + '"}').encode()
    yield "text: chat", chat, lambda: ('{"messages":[{"role":"user","content":"' + "the rabbit " * ((size - 60) // 11) + '"}]}').encode()
    long = json.dumps("the rabbit " * 181)
    yield "texts of 2,000 characters", completions, lambda: _filled('{"prompt":[', long, "]}", size)
    yield "unknown fields", completions, lambda: _numbered('{"prompt":"a",', lambda n: f'"x{n}":1', "}", size)
    yield "logit_bias", completions, lambda: _numbered('{"prompt":"a","logit_bias":{', lambda n: f'"{n}":1', "}}", size)
    yield "metadata", chat, lambda: _numbered(f'{{{user},"metadata":{{', lambda n: f'"x{n}":""', "}}", size)
    yield "template variables", chat, lambda: _numbered(f'{{{user},"chat_template_kwargs":{{', lambda n: f'"x{n}":1', "}}", size)
    yield "stops", completions, lambda: _filled('{"prompt":"a","stop":[', '"b"', "]}", size)
    yield "stop tokens", completions, lambda: _filled('{"prompt":"a","stop_token_ids":[', "1", "]}", size)
    yield "one field many times", completions, lambda: _filled('{"prompt":"a",', '"n":1', "}", size)
    yield "open lists", completions, lambda: b'{"prompt":' + b"[" * (size - 20)
    yield "a long number", completions, lambda: b'{"prompt":"a","n":' + b"7" * (size - 30) + b"}"
    yield "a long name", completions, lambda: b'{"prompt":"a","' + b"x" * (size - 30) + b'":1}'
    yield "spaces", completions, lambda: b" " * (size - 20) + b'{"prompt":"a"}'
    yield "no JSON", completions, lambda: b'"' * (size - 20)


def attack(server: Attacked, path: str, body: bytes) -> dict[str, Any]:
    """Send one body, and return what it did."""
    before = server.memory()
    server.forget_peak()
    with server.watched() as health:
        begin = time.perf_counter()
        try:
            status: int | str = server.ask(path, body)[0]
        except (OSError, http.client.HTTPException) as error:
            status = type(error).__name__
        answered = time.perf_counter() - begin
    time.sleep(0.2)
    return {
        "status": status,
        "answer_s": round(answered, 3),
        "health_s": round(health.longest, 3),
        "memory_mib": {"before": round(before), "peak": round(server.memory("VmHWM")), "after": round(server.memory())},
    }


def measure(*, quick: bool = False) -> dict[str, Any]:
    """Send each body to one server, one after the other."""
    rows: list[dict[str, Any]] = []
    with attacked_server() as server:
        server.ask("/v1/completions", {"prompt": "Alice was", "max_tokens": 4})
        server.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4})
        for name, path, make in bodies(1 << 16 if quick else SIZE):
            rows.append({"body": name, **attack(server, path, make())})
        first, last = rows[0]["memory_mib"]["before"], rows[-1]["memory_mib"]["after"]
    held = all(row["health_s"] <= LIMITS["health_s"] for row in rows) and last - first <= LIMITS["memory_left_mib"]
    return {"limits": LIMITS, "memory_left_mib": last - first, "rows": rows, "held": held}
