"""``SessionThread``: one session, run by a thread of its own for the tasks of an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeVar

from trt_kvcache.errors import ClosedError, ProcessorError
from trt_kvcache.generation.prompts import AnyPrompt
from trt_kvcache.generation.sampling import SamplingParams
from trt_kvcache.memory.cuda_memory import CudaMemory
from trt_kvcache.session.async_request import AsyncRequest
from trt_kvcache.session.request_handle import RequestHandle
from trt_kvcache.session.session import InferenceSession

_T = TypeVar("_T")

#: Seconds after which a thread without work checks that its event loop still exists.
IDLE_POLL_SECONDS = 1.0

#: Submits one request, in the thread of the session.
Submit = Callable[[InferenceSession], RequestHandle]


class _Command(NamedTuple):
    """A call between two steps: ``run`` in the thread, or ``fail`` in the event loop if the thread ends first."""

    run: Callable[[InferenceSession], object]
    fail: Callable[[BaseException], object]


class SessionThread:
    """Runs one session for any number of tasks of one event loop. It takes all requests: callers bound their number.

    All methods belong to the event loop, except those below "in the thread".
    """

    # The thread gets commands by a queue and answers by call_soon_threadsafe; no other state is shared between the two.

    def __init__(self, source: InferenceSession | Callable[[], InferenceSession], *, owner: str) -> None:
        self._source = source
        self._owner = owner  # a class name, for errors
        self._commands: SimpleQueue[_Command | None] = SimpleQueue()  # None ends the thread
        self._running: list[AsyncRequest] = []  # changed by the thread only
        self._deliveries: list[Callable[[], None]] = []  # of the last step, not yet with the event loop; of the thread only
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ended: asyncio.Future[None] | None = None
        self._closed = False

    async def start(self) -> None:
        """Start the thread, and open the session there if the source is a callable."""
        if self._thread is not None or self._closed:
            raise ClosedError(f"this {self._owner}: expected to be started once, got a second time.")
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        opened: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._work, args=(opened,), name="trt_kvcache session", daemon=True)
        self._thread.start()
        try:
            await asyncio.shield(opened)
        except BaseException:
            await self.close()
            raise

    async def run(self, function: Callable[[InferenceSession], _T]) -> _T:
        """Call a function with the session, in the thread, between two steps; return its result."""
        self.check_open()
        done: asyncio.Future[_T] = asyncio.get_running_loop().create_future()

        def call(session: InferenceSession) -> None:
            try:
                result = function(session)
            except BaseException as error:  # noqa: BLE001 - the caller gets it
                self._call_in_loop(_fail, done, error)
            else:
                self._call_in_loop(_succeed, done, result)

        self._commands.put(_Command(call, partial(_fail, done)))
        return await done

    async def submit(self, submits: Sequence[Submit], on_end: Callable[[], None] | None = None) -> list[AsyncRequest]:
        """Submit requests between two steps: all of them, or none. ``on_end`` is called once for each, also if none was submitted."""
        requests = [AsyncRequest(self._cancel, on_end or _do_nothing) for _ in submits]

        def begin(session: InferenceSession) -> None:
            handles: list[RequestHandle] = []
            try:
                for submit in submits:
                    handles.append(submit(session))
            except BaseException:
                for handle in handles:
                    handle.cancel()
                raise
            for request, handle in zip(requests, handles, strict=True):
                request.begin(handle)
            self._running.extend(requests)

        try:
            await self.run(begin)
        except asyncio.CancelledError:
            for request in requests:
                request.cancel()  # a command, which runs after ``begin``
            raise
        except BaseException:
            for request in requests:
                request.deliver([], ended=True)
            raise
        return requests

    async def submit_answers(
        self,
        prompt: AnyPrompt,
        params: Sequence[SamplingParams],
        *,
        prompt_logprobs: int | None,
        client: str,
        adapter: str | None,
        on_end: Callable[[], None] | None = None,
    ) -> list[AsyncRequest]:
        """Submit one prompt once for each of ``params``, one after the other, so that they run it once. The first one scores it."""

        def submit(one: SamplingParams, scored: int | None, session: InferenceSession) -> RequestHandle:
            return session.submit(prompt, one, prompt_logprobs=scored, client=client, adapter=adapter)

        submits = [partial(submit, one, None if index else prompt_logprobs) for index, one in enumerate(params)]
        return await self.submit(submits, on_end)

    async def close(self) -> None:
        """End all requests, close the session and end the thread. Idempotent."""
        self._closed = True
        if self._thread is None or self._ended is None:
            if isinstance(self._source, InferenceSession):
                self._source.close()
            return
        self._commands.put(None)
        await asyncio.shield(self._ended)
        self._thread.join()

    def check_open(self) -> None:
        """Raise ClosedError if it is closed or was not started."""
        if self._closed:
            raise ClosedError(f"this {self._owner} is closed.")
        if self._thread is None:
            raise ClosedError(f"this {self._owner}: expected start() first, or async with.")

    def _cancel(self, request: AsyncRequest) -> None:
        def cancel(session: InferenceSession) -> None:
            if request in self._running:
                self._running.remove(request)
                request.handle.cancel()
            self._call_in_loop(end)

        def end(_: BaseException | None = None) -> None:
            request.deliver([], ended=True)

        assert self._ended is not None
        if self._ended.done():  # the thread takes no commands any more
            end()
        else:
            self._commands.put(_Command(cancel, end))

    # --- in the thread ---

    def _work(self, opened: asyncio.Future[None]) -> None:
        error: BaseException | None = None
        try:
            session = self._source if isinstance(self._source, InferenceSession) else self._source()
            with session:
                memory = session.cache.memory
                if isinstance(memory, CudaMemory):
                    memory.make_current()
                self._call_in_loop(_succeed, opened, None)
                if _waits_for_a_device(session):
                    session._runner.before_wait = self._deliver
                self._serve(session)
        except BaseException as raised:  # noqa: BLE001 - start() or close() raises it
            error = raised
        with suppress(RuntimeError):  # the event loop has ended, and so has everyone who waits
            self._deliver()  # requests that have ended are not among those that _finish ends
            self._call_in_loop(self._finish, opened, error)

    def _serve(self, session: InferenceSession) -> None:
        """Run commands and steps until it is closed."""
        assert self._loop is not None
        slots_held = False
        while not self._loop.is_closed():
            with suppress(Empty):
                while True:
                    is_idle = not (self._running or slots_held)
                    if is_idle or not self._commands.empty():
                        self._deliver()  # before the effects of commands, and before it waits for one
                    command = self._commands.get(block=is_idle, timeout=IDLE_POLL_SECONDS)
                    if command is None:
                        return
                    command.run(session)
            if self._running or slots_held:
                deliveries, succeeded = self._step(session)
                self._deliver()  # if that step has not waited
                self._deliveries = deliveries
                if not _waits_for_a_device(session):
                    self._deliver()
                # A step that runs nothing frees the slots of the last requests. After a failure there is no such step: it would fail again.
                slots_held = succeeded and bool(session.running_requests)

    def _step(self, session: InferenceSession) -> tuple[list[Callable[[], None]], bool]:
        """Run one step; return the deliveries to requests that have changed, for the event loop, and whether the step succeeded."""
        error: BaseException | None = None
        failed: list[AsyncRequest] = []
        try:
            session.step()
        except Exception as raised:  # noqa: BLE001 - the requests that it concerns get it
            error = raised
            index = raised.request if isinstance(raised, ProcessorError) else None  # None: all of them
            failed = [request for request in self._running if index is None or request.handle.index == index]
        for request in failed:
            request.handle.cancel()
        deliveries: list[Callable[[], None]] = []
        for request in self._running:
            tokens, ended = request.unread(), request.handle.finished
            if tokens or ended:
                deliveries.append(partial(request.deliver, tokens, ended=ended, error=error if request in failed else None))
        self._running = [request for request in self._running if not request.handle.finished]
        return deliveries, error is None

    def _deliver(self) -> None:
        """Pass the tokens of the last step on to the event loop."""
        # The session calls it when it has enqueued the next step and waits for the device. So the event loop does not hold the GIL while
        # that step is launched.
        if self._deliveries:
            deliveries, self._deliveries = self._deliveries, []
            self._call_in_loop(_call_all, deliveries)

    def _call_in_loop(self, function: Callable[..., object], *arguments: object) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(function, *arguments)

    # --- in the event loop, after the thread has ended ---

    def _finish(self, opened: asyncio.Future[None], error: BaseException | None) -> None:
        """End everything that still waits for the thread."""
        assert self._ended is not None
        self._closed = True
        reason = ClosedError(f"this {self._owner} is closed.") if error is None else error
        for request in self._running:
            request.deliver([], ended=True, error=reason)
        self._running.clear()
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command.fail(reason)
        if error is not None and opened.done():
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)
        if error is not None:
            _fail(opened, error)


def _waits_for_a_device(session: InferenceSession) -> bool:
    """Return False if an enqueue computes on the host: then tokens would be a whole step late."""
    return not session.cache.memory.is_host


def _call_all(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        function()


def _do_nothing() -> None:
    pass


def _succeed(future: asyncio.Future[_T], result: _T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[_T], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
