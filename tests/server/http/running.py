"""A server in this process, on a free port, over the shipped model."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.helpers.sessions import Pace
from tests.server.engines import MODEL, paced, source
from trt_kvcache.server import AsyncEngine
from trt_kvcache.server.http import ServerOptions, make_app
from trt_kvcache.server.http.metrics import Metrics
from trt_kvcache.server.http.serving import Server, address_of, bound_socket

NAME = "tiny"

#: A turn begins with a letter and ends with a new line, so that a conversation begins like the one before it.
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}tool {{ tool.function.name }}\n{% endfor %}{% endif %}"
    "{% for message in messages %}{{ message.role[0] }}: {{ message.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


class Running:
    """A server that runs."""

    def __init__(self, url: str, engine: AsyncEngine, loop: asyncio.AbstractEventLoop, server: Server, pace: Pace) -> None:
        self.url = url
        self.engine = engine
        self.server = server
        self.pace = pace
        self._loop = loop

    def client(self, **options: Any) -> httpx.Client:
        """Return a client without limits of time that a busy machine could meet."""
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, **options)

    def stats(self) -> Any:
        """Return what the engine does now."""
        return asyncio.run_coroutine_threadsafe(self.engine.stats(), self._loop).result(60)

    def call(self, function: Callable[[], None]) -> None:
        """Run a function on the loop of the server, and raise its error."""

        async def run() -> None:
            function()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result(60)

    def wait_until(self, condition: Any, seconds: float = 60) -> None:
        """Wait until a function of the statistics is true."""
        ends = time.monotonic() + seconds
        while not condition(self.stats()):
            assert time.monotonic() < ends, self.stats()
            time.sleep(0.005)

    def wait_until_idle(self) -> None:
        """Wait until nothing runs or waits, and no slot is held."""
        self.wait_until(lambda now: not now.slots and not now.waiting and not self.engine.num_live)

    @contextmanager
    def held(self, steps: int = 0) -> Iterator[None]:
        """Let so many steps run and no more, as long as the block lasts."""
        self.pace.hold()
        self.pace.allow(steps)
        try:
            yield
        finally:
            self.pace.go()


@contextmanager
def serving(
    slots: int = 4,
    *,
    options: ServerOptions | None = None,
    max_queue: int = 64,
    max_seconds: float | None = None,
    drain_seconds: float = 5,
    folder: Path = MODEL,
    **session: Any,
) -> Iterator[Running]:
    """Run a server in a thread."""
    metrics, pace = Metrics(), Pace()
    opens = paced(source(slots, **session).replace(folder), pace)
    engine = AsyncEngine(opens, model=NAME, max_queue=max_queue, max_seconds=max_seconds, observer=metrics)
    allowed = options or ServerOptions()
    server = Server(make_app(engine, allowed, metrics=metrics), engine, options=allowed, drain_seconds=drain_seconds)
    bound = bound_socket("127.0.0.1", 0, allowed)
    loops: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve(sockets=[bound])

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="server of a test")
    thread.start()
    try:
        ends = time.monotonic() + 60
        while not server.started:
            assert thread.is_alive()
            assert time.monotonic() < ends
            time.sleep(0.005)
        yield Running(address_of(bound), engine, loops[0], server, pace)
    finally:
        server.should_exit = True
        thread.join(60)
        bound.close()
    assert not thread.is_alive(), "the server did not end"


def chat_model(folder: Path) -> Path:
    """Return a copy of the shipped model with a chat template."""
    shutil.copytree(MODEL, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the documents of a stream, which must end as streams end."""
    lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]
