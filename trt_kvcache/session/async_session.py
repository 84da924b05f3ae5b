"""``AsyncSession``: many callers of one event loop share the batches of a session."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from trt_kvcache._util.checks import int_in_range
from trt_kvcache.errors import CapacityError, ClosedError, ConfigError, ProcessorError, ShapeError
from trt_kvcache.generation.prompts import AnyPrompt, as_prompts, check_sequence
from trt_kvcache.generation.request import GeneratedToken
from trt_kvcache.generation.sampling import SamplingParams
from trt_kvcache.memory.cuda_memory import CudaMemory
from trt_kvcache.session.async_request import AsyncRequest
from trt_kvcache.session.request_handle import RequestHandle
from trt_kvcache.session.session import InferenceSession

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from trt_kvcache.generation.sampling import SamplingOptions

_T = TypeVar("_T")

#: Seconds after which a thread without work looks whether its event loop is still there.
_PATIENCE = 1.0

#: A request, its new tokens, whether it has ended, and why if it failed.
_News = tuple[AsyncRequest, list[GeneratedToken], bool, BaseException | None]

#: What the thread is to call with the session, and what to call with an error if it does not come to that.
_Command = tuple[Callable[[InferenceSession], object], Callable[[BaseException], object]]


class AsyncSession:
    """A session for asyncio. A thread of its own runs it; requests of any number of tasks share its batches.

    Parameters
    ----------
    source : InferenceSession or callable
        A session, or what opens one, such as a :class:`~trt_kvcache.session.session_source.SessionSource`: it is called in the thread.
        Closed with this object.
    max_requests : int
        :meth:`submit` waits while so many requests have not ended.

    Raises
    ------
    RangeError
        ``max_requests`` is not a positive integer.

    Notes
    -----
    A request gets the tokens that it would get alone. If a step fails, the requests that it concerns fail, and the session continues with
    the others: after a :class:`ProcessorError` that one request, after any other error all that had begun or waited.

    Examples
    --------
    >>> import asyncio
    >>> from trt_kvcache import AsyncSession, InferenceSession
    >>> async def serve():
    ...     session = InferenceSession.from_model("examples/tiny-llama", engine="numpy", max_batch_size=2)
    ...     async with AsyncSession(session) as served:
    ...         requests = [await served.submit([token], max_new_tokens=2, ignore_eos=True) for token in (5, 6, 7)]
    ...         async for token in served.generate([8], max_new_tokens=2, ignore_eos=True):
    ...             print(token.finish_reason)
    ...         return [len((await request.wait()).tokens) for request in requests]
    >>> asyncio.run(serve())
    None
    length
    [2, 2, 2]
    """

    def __init__(self, source: InferenceSession | Callable[[], InferenceSession], *, max_requests: int = 256) -> None:
        self._source = source
        self._max_requests = int_in_range("max_requests", max_requests, 1)
        self._room = asyncio.Semaphore(self._max_requests)
        self._arrival = asyncio.Lock()
        self._commands: SimpleQueue[_Command | None] = SimpleQueue()
        self._running: list[AsyncRequest] = []  # only the thread changes it
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ended: asyncio.Future[None] | None = None
        self._closed = False

    async def start(self) -> None:
        """Start the thread, and open the session there if a callable was given. ``async with`` calls it.

        Raises
        ------
        KVCacheError
            The session cannot be opened: as the callable raised it.
        ClosedError
            It was started before.
        """
        if self._thread is not None or self._closed:
            raise ClosedError("this AsyncSession: expected to be started once, got a second time.")
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

    async def submit(
        self,
        prompt: AnyPrompt,
        params: SamplingParams | None = None,
        *,
        prompt_logprobs: int | None = None,
        client: str = "",
        **options: Unpack[SamplingOptions],
    ) -> AsyncRequest:
        """Put a prompt in the queue. Waits while ``max_requests`` have not ended.

        Parameters
        ----------
        prompt : prompt
            Token ids, text, or a :class:`ChatPrompt`.
        params : SamplingParams, optional
            Not together with ``options``.
        prompt_logprobs : int, optional
            As for ``InferenceSession.submit``.
        client : str
            As for ``InferenceSession.submit``.
        **options
            Fields of :class:`SamplingParams`, instead of the model's defaults.

        Returns
        -------
        AsyncRequest
            Iterate over it, or ``await request.wait()``.

        Raises
        ------
        CapacityError, RangeError, ShapeError, ConfigError, BindingError
            As ``InferenceSession.submit``.
        ClosedError
            It is closed, or was not started.
        """

        def begin(session: InferenceSession) -> RequestHandle:
            return session.submit(prompt, params, prompt_logprobs=prompt_logprobs, client=client, **options)

        [request] = await self._submit([begin])
        return request

    async def submit_answers(
        self, prompt: AnyPrompt, params: Sequence[SamplingParams], *, prompt_logprobs: int | None = None, client: str = ""
    ) -> list[AsyncRequest]:
        """Put one prompt in the queue several times, one directly behind another, so that those that run together run it once.

        Parameters
        ----------
        prompt : prompt
            As for :meth:`submit`.
        params : sequence of SamplingParams (n,)
            Of each answer.
        prompt_logprobs : int, optional
            As for :meth:`submit`, with the first answer. Its prompt runs alone.
        client : str
            As for :meth:`submit`.

        Returns
        -------
        list of AsyncRequest
            One for each answer.

        Raises
        ------
        CapacityError, RangeError, ShapeError, ConfigError, BindingError, ClosedError
            As :meth:`submit`; or there are more answers than ``max_requests``. None of them has begun.
        """
        if len(params) > self._max_requests:
            raise CapacityError(f"params: expected at most max_requests={self._max_requests} answers, got {len(params)}.")

        def begin(of: SamplingParams, scored: int | None, session: InferenceSession) -> RequestHandle:
            return session.submit(prompt, of, prompt_logprobs=scored, client=client)

        return await self._submit([partial(begin, one, None if index else prompt_logprobs) for index, one in enumerate(params)])

    async def _submit(self, submits: Sequence[Callable[[InferenceSession], RequestHandle]]) -> list[AsyncRequest]:
        """Submit requests between two steps: all of them, or none. Waits for room."""
        self._check_open()
        requests: list[AsyncRequest] = []
        try:
            async with self._arrival:  # two who have room for a part of theirs would wait for each other
                for _ in submits:
                    await self._room.acquire()
                    requests.append(AsyncRequest(self._cancel, self._room.release))

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

            await self.run(begin)
        except BaseException as error:
            for request in requests:
                if isinstance(error, asyncio.CancelledError):
                    request.cancel()  # comes after ``begin``
                else:
                    request.deliver([], ended=True)
            raise
        return requests

    async def generate(
        self, prompt: AnyPrompt, params: SamplingParams | None = None, **options: Unpack[SamplingOptions]
    ) -> AsyncIterator[GeneratedToken]:
        """Continue one prompt, token by token. Leaving the iteration cancels the request.

        Parameters
        ----------
        prompt : prompt
            As for :meth:`submit`, like all that follows.
        params : SamplingParams, optional
            Not together with ``options``.
        **options
            Fields of :class:`SamplingParams`, instead of the model's defaults.

        Yields
        ------
        GeneratedToken
            The next token, as soon as it is there.

        Raises
        ------
        KVCacheError
            As :meth:`submit` and ``AsyncRequest.wait``.
        """
        request = await self.submit(prompt, params, **options)
        try:
            async for token in request:
                yield token
        finally:
            request.cancel()

    async def complete(
        self, prompts: AnyPrompt | Sequence[AnyPrompt], params: SamplingParams | None = None, **options: Unpack[SamplingOptions]
    ) -> list[str]:
        """Continue prompts, and return the texts once all are there. If one fails or the task is cancelled, all are.

        Parameters
        ----------
        prompts : prompt, or sequence of prompts (n,)
            Token ids, text, or a :class:`ChatPrompt`.
        params : SamplingParams, optional
            Of all prompts. Not together with ``options``.
        **options
            Fields of :class:`SamplingParams`, instead of the model's defaults.

        Returns
        -------
        list of str (n,)
            In the order of the prompts, without the prompts; a list of one for one prompt.

        Raises
        ------
        ConfigError
            The model has no tokenizer.
        ShapeError
            There is no prompt, or what was given is no sequence of them.
        KVCacheError
            As :meth:`submit` and ``AsyncRequest.wait``.

        Examples
        --------
        >>> import asyncio
        >>> from trt_kvcache import AsyncSession, SessionSource
        >>> async def main():
        ...     async with AsyncSession(SessionSource("examples/tiny-llama", engine="numpy")) as served:
        ...         return await served.complete(["Alice was", "Down the"], max_new_tokens=4)
        >>> asyncio.run(main())
        [' beginn', ' Rabbit-Hole']
        """
        given = as_prompts(prompts)
        check_sequence(given)
        if not len(given):
            raise ShapeError("prompts: expected at least one, got none.")
        if await self.run(lambda session: session.tokenizer) is None:
            raise ConfigError("text: expected a model folder with tokenizer.json, got none. submit returns token ids.")
        requests: list[AsyncRequest] = []
        try:
            for prompt in given:
                requests.append(await self.submit(prompt, params, **options))
            for request in requests:
                await request.wait()
        finally:
            for request in requests:
                if not request.ended:
                    request.cancel()
        return [request.text for request in requests]

    async def run(self, function: Callable[[InferenceSession], _T]) -> _T:
        """Call a function with the session, in its thread, between two steps.

        Parameters
        ----------
        function : callable
            ``function(session)``, for instance one that saves a snapshot.

        Returns
        -------
        object
            What it returned.

        Raises
        ------
        ClosedError
            It is closed, or was not started.
        """
        self._check_open()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[_T] = loop.create_future()

        def call(session: InferenceSession) -> None:
            try:
                result = function(session)
            except BaseException as error:  # noqa: BLE001 - it is the caller's
                self._tell(_fail, done, error)
            else:
                self._tell(_succeed, done, result)

        self._commands.put((call, partial(_fail, done)))
        return await done

    async def close(self) -> None:
        """End all requests, close the session and end the thread. Idempotent. Iterations over requests raise :class:`ClosedError`."""
        self._closed = True
        if self._thread is None or self._ended is None:
            if isinstance(self._source, InferenceSession):
                self._source.close()
            return
        self._commands.put(None)
        await asyncio.shield(self._ended)
        self._thread.join()

    async def __aenter__(self) -> AsyncSession:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this AsyncSession is closed.")
        if self._thread is None:
            raise ClosedError("this AsyncSession: expected start() first, or async with.")

    def _cancel(self, request: AsyncRequest) -> None:
        def cancel(session: InferenceSession) -> None:
            if request in self._running:
                self._running.remove(request)
                request.handle.cancel()
            self._tell(_deliver, [(request, [], True, None)])

        def end(_: BaseException | None = None) -> None:
            request.deliver([], ended=True)

        assert self._ended is not None
        if self._ended.done():  # no thread is there to take a command
            end()
        else:
            self._commands.put((cancel, end))

    # --- in the thread of the session ---

    def _work(self, opened: asyncio.Future[None]) -> None:
        error: BaseException | None = None
        try:
            session = self._source if isinstance(self._source, InferenceSession) else self._source()
            with session:
                memory = session.cache.memory
                if isinstance(memory, CudaMemory):
                    memory.make_current()
                self._tell(_succeed, opened, None)
                self._serve(session)
        except BaseException as raised:  # noqa: BLE001 - start() or close() raises it
            error = raised
        with suppress(RuntimeError):  # the event loop is gone, and with it everyone who waits
            self._tell(self._finish, opened, error)

    def _serve(self, session: InferenceSession) -> None:
        """Run commands and steps until it is closed."""
        assert self._loop is not None
        slots_held = False
        while not self._loop.is_closed():
            with suppress(Empty):
                while True:
                    command = self._commands.get(block=not (self._running or slots_held), timeout=_PATIENCE)
                    if command is None:
                        return
                    command[0](session)
            if self._running or slots_held:
                news, has_run = self._step(session)
                if news:
                    self._tell(_deliver, news)
                # Slots of the last requests are freed by a step that runs nothing. One that fails is not tried again alone.
                slots_held = has_run and bool(session.running_requests)

    def _step(self, session: InferenceSession) -> tuple[list[_News], bool]:
        """Run one step, and return what came of it, and whether it has not failed."""
        failed: BaseException | None = None
        concerned: list[AsyncRequest] = []
        try:
            session.step()
        except Exception as error:  # noqa: BLE001 - those who wait get it
            failed = error
            index = error.request if isinstance(error, ProcessorError) else None
            concerned = [request for request in self._running if index is None or request.handle.index == index]
        news: list[_News] = []
        for request in list(self._running):
            reason = failed if request in concerned else None
            if reason is not None:
                request.handle.cancel()
            events = request.unread()
            if request.handle.finished:
                self._running.remove(request)
            if events or request.handle.finished:
                news.append((request, events, request.handle.finished, reason))
        return news, failed is None

    def _tell(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function in the event loop."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(function, *arguments)

    # --- in the event loop, after the thread ---

    def _finish(self, opened: asyncio.Future[None], error: BaseException | None) -> None:
        """Tell everyone who waits that the thread has ended."""
        assert self._ended is not None
        self._closed = True
        reason = ClosedError("this AsyncSession is closed.") if error is None else error
        for request in self._running:
            request.deliver([], ended=True, error=reason)
        self._running.clear()
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command[1](reason)
        if error is not None and opened.done():
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)
        if error is not None:
            _fail(opened, error)


def _deliver(news: list[_News]) -> None:
    for request, events, ended, error in news:
        request.deliver(events, ended=ended, error=error)


def _succeed(future: asyncio.Future[_T], result: _T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[_T], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
