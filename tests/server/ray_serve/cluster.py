"""``serve run`` in a process of its own: an application of two replicas on this machine."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from tests.server.http.running import NAME, chat_model

#: Slots of each replica.
SLOTS = 2

_FILE = """
http_options: {{host: 127.0.0.1, port: {port}}}
applications:
  - name: tiny
    route_prefix: /
    import_path: trt_kvcache.server.ray_serve:application
    args: {{model: "{model}", name: {name}, engine: reference, slots: {slots}, context: 500, replicas: 2, cpus: 0, requests: 200}}
"""


class Cluster:
    """An application that runs."""

    def __init__(self, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.url = url
        self.process = process
        self.log = log

    def client(self) -> httpx.Client:
        """Return a client without limits of time that a busy machine could meet."""
        return httpx.Client(base_url=self.url, timeout=120, trust_env=False)

    def stats(self) -> dict[str, Any]:
        """Return what all replicas do now."""
        with self.client() as client:
            return client.get("/stats").raise_for_status().json()

    def replicas(self) -> set[int]:
        """Return the processes of the engines."""
        return {pid for pid in self.processes() if re.match(rb"ray::ServeReplica:tiny:engine", _command(pid))}

    def processes(self) -> set[int]:
        """Return all processes that it has started."""
        parents = {int(path.name): _parent(path) for path in Path("/proc").iterdir() if path.name.isdigit()}
        found, size = {self.process.pid}, 0
        while len(found) > size:
            size = len(found)
            found |= {pid for pid, parent in parents.items() if parent in found}
        return found

    def wait_until(self, condition: Callable[[], bool], seconds: float = 120) -> None:
        """Wait until something is true."""
        ends = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < ends, self.log.read_text()[-4000:]
            time.sleep(0.05)

    def answers(self) -> bool:
        """Tell whether it is there."""
        with self.client() as client:
            try:
                return client.get("/health").status_code == httpx.codes.OK
            except httpx.TransportError:
                return False


def _take_interrupts() -> None:
    """Let the new process see Ctrl-C, which is ignored where the tests run in the background of a script."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _free_port() -> int:
    """Return a port that is free now, and that the system gives to nobody who asks for any: Ray itself asks for many before it takes it."""
    for port in random.sample(range(20_000, 30_000), 1000):
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")


@contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """Run the application, and end it as Ctrl-C does."""
    model = chat_model(folder / "tiny")
    port = _free_port()
    file = folder / "application.yaml"
    file.write_text(_FILE.format(port=port, model=model, name=NAME, slots=SLOTS))
    log = folder / "log.txt"
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    command = [str(Path(sys.executable).with_name("serve")), "run", "--app-dir", str(Path.cwd()), str(file)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_take_interrupts,
        )
    cluster = Cluster(f"http://127.0.0.1:{port}", process, log)
    try:
        cluster.wait_until(lambda: cluster.answers() and len(cluster.replicas()) == 2)
        yield cluster
    finally:
        everything = cluster.processes()
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            for pid in everything:
                _kill(pid)
            raise
    assert process.returncode == 0, log.read_text()[-4000:]
    ends = time.monotonic() + 30
    while any(_lives(pid) for pid in everything):
        assert time.monotonic() < ends, [_command(pid) for pid in everything]
        time.sleep(0.1)


def _kill(pid: int) -> None:
    if _lives(pid):
        os.kill(pid, signal.SIGKILL)


def _lives(pid: int) -> bool:
    try:
        return b") Z " not in Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False


def _parent(path: Path) -> int:
    try:
        return int((path / "stat").read_bytes().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
