"""``trt-kvcache serve`` as a process, to be attacked, and what others see of it meanwhile."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"

#: Asks for /health until its input ends, each time over a new connection; prints the longest wait in seconds, how many were answered, and
#: how many were not.
WATCHER = """
import http.client, json, sys, threading, time
host, port, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
longest, answered, failed, ended = 0.0, 0, 0, threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
while not ended.is_set() or not answered + failed:
    begin = time.perf_counter()
    try:
        connection = http.client.HTTPConnection(host, port, timeout=120)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        answered += 1
    except (OSError, http.client.HTTPException, AssertionError):
        failed += 1
    finally:
        connection.close()
    longest = max(longest, time.perf_counter() - begin)
    if answered + failed == 1:
        print("watching", flush=True)
    ended.wait(pause)
print(json.dumps({"longest": longest, "answered": answered, "failed": failed}))
"""


class Health:
    """Waiting times of a client that polls ``/health``: filled when the block of ``watched`` ends."""

    longest = 0.0
    answered = failed = 0


class Attacked:
    """A server that runs.

    Parameters
    ----------
    process : Popen
        Its process; stderr is read.
    url : str
        Such as ``http://127.0.0.1:8000``.

    Attributes
    ----------
    url, host, port, pid : str, str, int, int
        Where it is.
    said : list of str
        The lines that it has written to stderr so far, but for the first one.
    """

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        found = re.fullmatch(r"http://\[?([^\]]+?)\]?:(\d+)", url)
        assert found, url
        self.url, self.host, self.port, self.pid = url, found[1], int(found[2]), process.pid
        self.process = process
        self.said: list[str] = []
        self._reader = threading.Thread(target=lambda: self.said.extend(process.stderr or ()))
        self._reader.start()

    def connect(self, timeout: float = 60) -> socket.socket:
        """Return a connection."""
        return socket.create_connection((self.host, self.port), timeout=timeout)

    def ask(self, path: str, body: Any = None, *, headers: Mapping[str, str] | None = None, timeout: float = 120) -> tuple[int, bytes]:
        """Return status and body of an answer: to a POST of a document, or of bytes as they are; to a GET without a body."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            sent = {**({} if body is None else {"Content-Type": "application/json"}), **(headers or {})}
            connection.request("GET" if body is None else "POST", path, content, sent)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def memory(self, name: str = "VmRSS") -> float:
        """Return MiB of memory of the server's process, of which Linux tells."""
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii")
        return int(re.search(rf"{name}:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]

    def forget_peak(self) -> None:
        """Have ``memory("VmHWM")`` begin again."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5", encoding="ascii")

    def descriptors(self) -> int:
        """Return how many files and sockets it has open."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    @contextmanager
    def watched(self, pause: float = 0.02) -> Iterator[Health]:
        """Ask for ``/health`` from another process, every ``pause`` seconds, as long as the block lasts."""
        health = Health()
        command = [sys.executable, "-c", WATCHER, self.host, str(self.port), str(pause)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watcher:
            assert watcher.stdin is not None
            assert watcher.stdout is not None
            watcher.stdout.readline()
            try:
                yield health
            finally:
                watcher.stdin.close()
                vars(health).update(json.loads(watcher.stdout.readline()))

    def end(self) -> int:
        """Kill it if it runs, and return its exit code."""
        if self.process.poll() is None:
            self.process.kill()
        code = self.process.wait(60)
        self._reader.join(60)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


@contextmanager
def attacked_server(
    *options: str, slots: int = 4, descriptors: int | None = None, template: str = TEMPLATE, **environment: str
) -> Iterator[Attacked]:
    """Run ``trt-kvcache serve`` over the shipped model with a chat template.

    Parameters
    ----------
    *options : str
        Further ones of ``serve``.
    slots : int
        Requests that run at once.
    descriptors : int, optional
        The process may have no more open files.
    template : str
        The chat template.
    **environment : str
        Variables.

    Yields
    ------
    Attacked
        The server. It is killed when the block ends.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "tiny-llama"
        shutil.copytree(ROOT / "examples" / "tiny-llama", folder)
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        command = [sys.executable, "-m", "trt_kvcache", "serve", str(folder), "--engine", "reference", "--port", "0"]
        command += ["--max-batch-size", str(slots), *options]
        limited = command if descriptors is None else _with_descriptors(command, descriptors)
        given = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", **environment}
        process = subprocess.Popen(limited, stderr=subprocess.PIPE, text=True, env=given)
        assert process.stderr is not None
        first = process.stderr.readline()
        found = re.search(r"http://\S+:\d+", first)
        if found is None:
            process.kill()
            raise RuntimeError(first + process.communicate()[1])
        server = Attacked(process, found[0])
        try:
            yield server
        finally:
            server.end()


def _with_descriptors(command: Sequence[str], count: int) -> list[str]:
    program = (
        "import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]),) * 2); os.execv(sys.argv[2], sys.argv[2:])"
    )
    return [sys.executable, "-c", program, str(count), *command]
