"""``Rendering``: conversations are rendered by the chat template, several in parallel, in turns between clients."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from trt_kvcache._util.turns import Turns
from trt_kvcache.checkpoint.template_processes import MOST_PROCESSES
from trt_kvcache.errors import ClosedError, QueueFullError
from trt_kvcache.server.shares import room_for


@dataclass(frozen=True, eq=False)
class _Turn:
    """A text that waits to be rendered."""

    client: str
    comes: asyncio.Future[None]


class Rendering:
    """Calls functions that render a text in threads, as many at once as there are template processes. Belongs to one event loop."""

    # A free thread goes to the client with the fewest. The last free one goes to a client that has none: a client with slow texts never
    # has all threads, and the texts of others do not wait for them.

    def __init__(self, max_queue: int) -> None:
        self._places = MOST_PROCESSES + max_queue
        self._threads = ThreadPoolExecutor(MOST_PROCESSES, thread_name_prefix="chat template")
        self._running: Counter[str] = Counter()
        self._waiting: Turns[_Turn] = Turns()
        self._taken: Counter[str] = Counter()  # texts that run or wait, by client
        self._closed = False

    async def run(self, client: str, render: Callable[[], str]) -> str:
        """Call a function in a thread, when it is the turn of its client. If cancelled, it keeps its thread until it returns."""
        if self._closed:
            raise _refusal()
        if not room_for(client, self._taken, self._places):
            raise QueueFullError(f"queue: expected room for one more of {self._places} conversations, got none. Try again later.")
        loop = asyncio.get_running_loop()
        turn = _Turn(client, loop.create_future())
        self._taken[client] += 1
        self._waiting.add(client, turn)
        self._begin_next()
        try:
            await turn.comes
            rendered = self._threads.submit(render)
        except BaseException:
            if self._waiting.discard(client, turn):
                _subtract(self._taken, client)
            else:
                self._leave(client)
            raise
        rendered.add_done_callback(lambda _: _tell(loop, self._leave, client))
        return await asyncio.wrap_future(rendered)

    def close(self) -> None:
        """Refuse waiting and later texts. Running functions end by themselves. Idempotent."""
        self._closed = True
        for turn in self._waiting.first(len(self._waiting), {}):
            if not turn.comes.done():
                turn.comes.set_exception(_refusal())
        self._threads.shutdown(wait=False)

    def _begin_next(self) -> None:
        """Give free threads to the texts whose turn it is."""
        while not self._closed and (free := MOST_PROCESSES - self._running.total()):
            turn = next(iter(self._waiting.first(1, self._running)), None)
            if turn is None or (free == 1 and self._running[turn.client]):
                return
            self._waiting.discard(turn.client, turn)
            self._waiting.end_turn(turn.client)
            self._running[turn.client] += 1
            turn.comes.set_result(None)

    def _leave(self, client: str) -> None:
        """Take a thread back."""
        _subtract(self._running, client)
        _subtract(self._taken, client)
        self._waiting.end_turn(client)
        self._begin_next()


def _refusal() -> ClosedError:
    return ClosedError("this server takes no new requests: it is about to end.")


def _subtract(counts: Counter[str], client: str) -> None:
    counts[client] -= 1
    if not counts[client]:
        del counts[client]


def _tell(loop: asyncio.AbstractEventLoop, function: Callable[[str], None], client: str) -> None:
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(function, client)
