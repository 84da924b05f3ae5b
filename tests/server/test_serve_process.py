"""``trt-kvcache serve`` as a process: how it begins, and how it ends."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.server.engines import MODEL
from tests.server.needs_libraries import need_libraries

need_libraries("httpx", "psutil")

import httpx  # noqa: E402
import psutil  # noqa: E402

OPTIONS = ["--engine", "reference", "--max-batch-size", "2"]
SERVE = [sys.executable, "-m", "trt_kvcache", "serve"]


class Process:
    """A server that runs."""

    def __init__(self, *options: str, port: int = 0, model: Path = MODEL, **environment: str) -> None:
        command = [*SERVE, str(model), *OPTIONS, "--port", str(port), *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})
        assert self.process.stderr is not None
        self.first = self.process.stderr.readline()
        found = re.search(r"http://[\d.]+:(\d+)", self.first)
        assert found, self.first + self.process.stderr.read()
        self.url, self.port = found[0], int(found[1])
        self.said: list[str] = []
        self._reader = threading.Thread(target=lambda: self.said.extend(self.process.stderr or ()))
        self._reader.start()

    def wait_until_it_drains(self) -> None:
        """Wait until it says that it has taken a first signal."""
        ends = time.monotonic() + 60
        while not any("live answers may finish" in line for line in list(self.said)):
            assert time.monotonic() < ends, self.said
            time.sleep(0.005)

    def wait(self) -> int:
        """Wait until it has ended; return its exit code."""
        code = self.process.wait(60)
        self._reader.join(60)
        return code


@contextmanager
def process(*options: str, port: int = 0, model: Path = MODEL, **environment: str) -> Iterator[Process]:
    one = Process(*options, port=port, model=model, **environment)
    try:
        yield one
    finally:
        if one.process.poll() is None:
            one.process.kill()
        one.wait()
        assert one.process.stderr is not None
        one.process.stderr.close()


def client(url: str, **options) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=60, trust_env=False, **options)


def text(url: str) -> str:
    with client(url) as one:
        answer = one.post("/v1/completions", json={"prompt": "Alice was", "max_tokens": 8, "model": "tiny-llama"})
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_it_says_where_it_listens_and_ends_in_order():
    with process() as one:
        assert "tiny-llama at http://127.0.0.1:" in one.first
        assert "2 slots of 512 tokens, no API key" in one.first
        assert text(one.url) == " beginning to get very"
        one.process.send_signal(signal.SIGTERM)
        assert one.wait() == 0
        assert any("live answers may finish" in line for line in one.said)


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_lets_answers_end(sent: signal.Signals):
    body = {"prompt": "A", "max_tokens": 500, "ignore_eos": True, "stream": True}
    with process("--drain-seconds", "300") as one, client(one.url) as asking, asking.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        one.process.send_signal(sent)
        rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert one.wait() == 0


@pytest.mark.long
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_second_signal_ends_at_once():
    body = {"prompt": ["A"] * 40, "max_tokens": 500, "ignore_eos": True, "stream": True}
    with process("--drain-seconds", "300") as one, client(one.url) as asking, asking.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        one.process.send_signal(signal.SIGTERM)
        one.wait_until_it_drains()
        one.process.send_signal(signal.SIGTERM)
        one.wait()
        assert not any("Traceback" in line for line in one.said), one.said
        with suppress(httpx.HTTPError):
            assert "data: [DONE]" not in list(lines)


@pytest.mark.long
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_one_that_was_killed_starts_again_at_the_same_port():
    body = {"prompt": "A", "max_tokens": 500, "ignore_eos": True, "stream": True}
    with process() as one, client(one.url) as asking:
        with suppress(httpx.HTTPError), asking.stream("POST", "/v1/completions", json=body) as stream:
            for _ in stream.iter_lines():
                one.process.kill()
        assert one.wait() == -signal.SIGKILL
        with process(port=one.port) as again:
            assert again.port == one.port
            assert text(again.url) == " beginning to get very"


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)])
def test_grammars_that_never_end_hold_neither_others_nor_the_end_up(sent: signal.Signals, code: int):
    with process("--drain-seconds", "1") as one, ThreadPoolExecutor(6) as clients:
        for index in range(6):
            clients.submit(ask_for_an_endless_grammar, one.url, index)
        server = psutil.Process(one.process.pid)
        while not server.children():
            time.sleep(0.01)
        assert text(one.url) == " beginning to get very"
        with client(one.url) as asking:
            began = time.monotonic()
            assert asking.get("/health").status_code == 200
            assert time.monotonic() - began < 2
        workers = server.children()
        one.process.send_signal(sent)
        assert one.wait() == code
        assert psutil.wait_procs(workers, timeout=10)[1] == []


def ask_for_an_endless_grammar(url: str, index: int):
    schema = {"type": "integer", "multipleOf": 99999989, "title": str(index)}
    with client(url) as asking, suppress(httpx.HTTPError):
        asking.post("/v1/completions", json={"prompt": "A", "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}})


@pytest.mark.long
def test_keys_from_the_environment_and_a_file(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("first\n\nsecond\n")
    with process("--api-key-file", str(keys), TRT_KVCACHE_API_KEY="third") as one, client(one.url) as asking:
        assert "no API key" not in one.first
        found = [
            asking.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code for key in ("first", "second", "third", "x")
        ]
        assert found == [200, 200, 200, 401]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--host", "0.0.0.0"], "error: --host: expected an address of this machine alone"),
        (["--host", "no-such-name.invalid"], "error: --host: expected"),
        (["--api-key", ""], "error: --api-key-file: expected keys of visible ASCII characters"),
        (["--api-key-file", os.devnull], "expected a key in each line, got none"),
    ],
)
def test_what_cannot_be_served_is_said_before_the_model_is_opened(options, text):
    done = subprocess.run([*SERVE, str(MODEL), *OPTIONS, *options], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert text in done.stderr


#: Takes ten seconds for the text "slow", after which it is stopped.
SLOW = (
    "{% if messages[0].content == 'slow' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_slow_templates_hold_up_neither_others_nor_the_end(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    (model / "chat_template.jinja").write_text(SLOW)

    sent = threading.Semaphore(0)

    def trace(event: str, info: dict) -> None:
        if event == "http11.send_request_body.complete":
            sent.release()

    def ask(address: str, content: str) -> int:
        transport = httpx.HTTPTransport(local_address=address)
        with client(one.url, transport=transport) as asking:
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
            return asking.post("/v1/chat/completions", json=body, extensions={"trace": trace}).status_code

    with process(model=model) as one, ThreadPoolExecutor(8) as threads:
        assert ask("127.0.0.2", "Alice was") == 200
        assert sent.acquire(timeout=60)
        slow = [threads.submit(ask, "127.0.0.1", "slow") for _ in range(8)]
        # After SIGTERM the server refuses new connections, and answers accepted ones with 503. It accepts connections in order, so an
        # answer to a ninth request shows that it has accepted the eight before.
        assert all(sent.acquire(timeout=60) for _ in range(8))
        assert ask("127.0.0.2", "Alice was") == 200
        assert not any(task.done() for task in slow)
        one.process.send_signal(signal.SIGTERM)
        assert one.wait() == 0
        assert {task.result() for task in slow} == {503}
        assert not any("Traceback" in line for line in one.said), one.said
