"""``AsyncSession``: the tasks of an event loop share the batches of a session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from trt_kvcache._util.checks import int_in_range
from trt_kvcache.errors import CapacityError, ConfigError, ShapeError
from trt_kvcache.generation.drafter import DraftChoice
from trt_kvcache.generation.prompts import AnyPrompt, as_prompts, check_sequence
from trt_kvcache.generation.request import GeneratedToken
from trt_kvcache.generation.sampling import SamplingParams
from trt_kvcache.session.async_request import AsyncRequest
from trt_kvcache.session.request_handle import RequestHandle
from trt_kvcache.session.session import InferenceSession
from trt_kvcache.session.session_thread import SessionThread

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from trt_kvcache.generation.sampling import SamplingOptions

_T = TypeVar("_T")


class AsyncSession:
    """A session for asyncio. A separate thread runs it; requests of any number of tasks share its batches.

    Parameters
    ----------
    source : InferenceSession or callable
        A session, or a function that opens one in the thread, such as a
        :class:`~trt_kvcache.session.session_source.SessionSource`. The session is closed with this object.
    max_requests : int
        :meth:`submit` waits while this number of requests has not ended.

    Raises
    ------
    RangeError
        ``max_requests`` is not a positive integer.

    Notes
    -----
    The tokens of a request do not depend on other requests. If a step fails with a :class:`ProcessorError`, its request fails. After any
    other error, all running and waiting requests fail. The session continues with later ones.

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
        self._max_requests = int_in_range("max_requests", max_requests, 1)
        self._room = asyncio.Semaphore(self._max_requests)
        self._arrival = asyncio.Lock()
        self._thread = SessionThread(source, owner="AsyncSession")

    async def start(self) -> None:
        """Start the thread, and open the session there if a callable was given. ``async with`` calls it.

        Raises
        ------
        KVCacheError
            The session cannot be opened: the error of the callable.
        ClosedError
            It has been started before.
        """
        await self._thread.start()

    async def submit(
        self,
        prompt: AnyPrompt,
        params: SamplingParams | None = None,
        *,
        prompt_logprobs: int | None = None,
        client: str = "",
        draft: DraftChoice | None = None,
        adapter: str | None = None,
        **options: Unpack[SamplingOptions],
    ) -> AsyncRequest:
        """Queue a prompt. Waits while ``max_requests`` have not ended.

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
        draft : "ngram", "mtp", "off" or Drafter, optional
            As for ``InferenceSession.generate``.
        adapter : str, optional
            Name of an adapter of the session; the base model if left out.
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
            return session.submit(prompt, params, prompt_logprobs=prompt_logprobs, client=client, draft=draft, adapter=adapter, **options)

        await self._reserve(1)
        [request] = await self._thread.submit([begin], self._room.release)
        return request

    async def submit_answers(
        self,
        prompt: AnyPrompt,
        params: Sequence[SamplingParams],
        *,
        prompt_logprobs: int | None = None,
        client: str = "",
        adapter: str | None = None,
    ) -> list[AsyncRequest]:
        """Queue one prompt several times, one directly after the other. Answers that start together run the prompt once.

        Parameters
        ----------
        prompt : prompt
            As for :meth:`submit`.
        params : sequence of SamplingParams (n,)
            Sampling parameters of each answer.
        prompt_logprobs : int, optional
            As for :meth:`submit`, for the first answer, whose prompt runs separately.
        client : str
            As for :meth:`submit`.
        adapter : str, optional
            As for :meth:`submit`, for all answers.

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

        await self._reserve(len(params))
        return await self._thread.submit_answers(
            prompt, params, prompt_logprobs=prompt_logprobs, client=client, adapter=adapter, on_end=self._room.release
        )

    async def _reserve(self, count: int) -> None:
        """Wait until ``count`` more requests fit; a request frees its place when it ends."""
        self._thread.check_open()
        reserved = 0
        try:
            async with self._arrival:  # two callers, each with room for a part of its requests, would wait for each other
                for _ in range(count):
                    await self._room.acquire()
                    reserved += 1
        except BaseException:
            for _ in range(reserved):
                self._room.release()
            raise

    async def generate(
        self, prompt: AnyPrompt, params: SamplingParams | None = None, *, adapter: str | None = None, **options: Unpack[SamplingOptions]
    ) -> AsyncIterator[GeneratedToken]:
        """Continue one prompt, token by token. Leaving the iteration cancels the request.

        Parameters
        ----------
        prompt : prompt
            As for :meth:`submit`.
        params : SamplingParams, optional
            Not together with ``options``.
        adapter : str, optional
            As for :meth:`submit`.
        **options
            Fields of :class:`SamplingParams`, instead of the model's defaults.

        Yields
        ------
        GeneratedToken
            The next token, as soon as it is generated.

        Raises
        ------
        KVCacheError
            As :meth:`submit` and ``AsyncRequest.wait``.
        """
        request = await self.submit(prompt, params, adapter=adapter, **options)
        try:
            async for token in request:
                yield token
        finally:
            request.cancel()

    async def complete(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        **options: Unpack[SamplingOptions],
    ) -> list[str]:
        """Continue prompts, and return all texts. If one fails or the task is cancelled, all are cancelled.

        Parameters
        ----------
        prompts : prompt, or sequence of prompts (n,)
            Token ids, text, or a :class:`ChatPrompt`.
        params : SamplingParams, optional
            For all prompts. Not together with ``options``.
        adapter : str, optional
            As for :meth:`submit`, for all prompts.
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
            There is no prompt, or ``prompts`` is no sequence of prompts.
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
                requests.append(await self.submit(prompt, params, adapter=adapter, **options))
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
            Its result.

        Raises
        ------
        ClosedError
            It is closed, or was not started.
        """
        return await self._thread.run(function)

    async def close(self) -> None:
        """End all requests, close the session and end the thread. Idempotent. Iterations over requests raise :class:`ClosedError`."""
        await self._thread.close()

    async def __aenter__(self) -> AsyncSession:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
