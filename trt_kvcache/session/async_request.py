"""``AsyncRequest``: a prompt that was submitted to an :class:`AsyncSession`, seen from the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Literal

from trt_kvcache.generation.request import FinishReason, GeneratedToken
from trt_kvcache.session.request_handle import RequestHandle


class AsyncRequest:
    """One submitted prompt. ``AsyncSession.submit`` makes it. Iterate over it for its tokens, as they are generated.

    Parameters
    ----------
    cancel : callable
        Asks the session to end this request.
    on_end : callable
        Called once, when it has ended.

    Notes
    -----
    All of it belongs to the event loop; the thread of the session passes tokens on. Every iteration begins with the first token. If a task
    is cancelled while it waits for a token, its request is cancelled too.
    """

    def __init__(self, cancel: Callable[[AsyncRequest], None], on_end: Callable[[], None]) -> None:
        self._cancel = cancel
        self._on_end = on_end
        self._handle: RequestHandle | None = None
        self._events: list[GeneratedToken] = []
        self._times: list[float] = []
        self._num_read = 0
        self._ended = False
        self._error: BaseException | None = None
        self._change: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __repr__(self) -> str:
        state = "ended" if self._ended else "running"
        return f"AsyncRequest(state={state!r}, tokens={len(self._events)}, finish_reason={self.finish_reason!r})"

    @property
    def handle(self) -> RequestHandle:
        """The request in the queue of the session. Do not change it."""
        assert self._handle is not None
        return self._handle

    @property
    def ended(self) -> bool:
        """True once it has ended: with its last token, by ``cancel``, or because it failed."""
        return self._ended

    @property
    def events(self) -> tuple[GeneratedToken, ...]:
        """The tokens so far."""
        return tuple(self._events)

    @property
    def times(self) -> tuple[float, ...]:
        """Arrival time of each token so far, by ``time.perf_counter``."""
        return tuple(self._times)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The ids of the tokens so far, including the stop token."""
        return tuple(event.token for event in self._events)

    @property
    def text(self) -> str:
        """The text so far. Empty without a tokenizer."""
        return "".join(event.text for event in self._events)

    @property
    def finish_reason(self) -> FinishReason | Literal["cancelled"] | None:
        """Reason of its end: ``"stop"``, ``"length"`` or ``"cancelled"``; None while it continues, and if it failed."""
        last = self._events[-1].finish_reason if self._events else None
        return last or ("cancelled" if self._ended and self._error is None else None)

    def cancel(self) -> None:
        """End the request now. Its tokens so far stay, and iterations over it end."""
        self._cancel(self)

    async def wait(self) -> AsyncRequest:
        """Wait until it has ended.

        Returns
        -------
        AsyncRequest
            Itself.

        Raises
        ------
        ProcessorError, EngineError, CudaError
            A step of it failed.
        ClosedError
            The session was closed before it ended.
        """
        async for _ in self:
            pass
        return self

    async def read(self, count: int) -> list[GeneratedToken]:
        """Wait for tokens after the first ``count``, and return all that are there. A reader that is slow gets several at once.

        Parameters
        ----------
        count : int
            Number of tokens that the caller already has.

        Returns
        -------
        list of GeneratedToken
            At least one; empty if it has ended without more.

        Raises
        ------
        ProcessorError, EngineError, CudaError, ClosedError
            As :meth:`wait`, after its last token.
        """
        while count >= len(self._events):
            if self._ended:
                if self._error is not None:
                    raise self._error
                return []
            try:
                await asyncio.shield(self._change)
            except asyncio.CancelledError:
                self.cancel()
                raise
        return self._events[count:]

    async def __aiter__(self) -> AsyncIterator[GeneratedToken]:
        count = 0
        while new := await self.read(count):
            for event in new:
                count += 1
                yield event

    # --- for the session ---

    def begin(self, handle: RequestHandle) -> None:
        """Record the request in the queue of the session."""
        self._handle = handle

    def unread(self) -> list[GeneratedToken]:
        """Return the tokens that came since the last call, in the thread of the session."""
        new = list(self.handle.events[self._num_read :])
        self._num_read += len(new)
        return new

    def deliver(self, events: list[GeneratedToken], *, ended: bool, error: BaseException | None = None) -> None:
        """Take new tokens, in the event loop, and wake those who wait.

        Parameters
        ----------
        events : list of GeneratedToken
            New tokens.
        ended : bool
            True if these are the last.
        error : BaseException, optional
            The error that ended it.
        """
        if self._ended:
            return
        self._events += events
        self._times += [time.perf_counter()] * len(events)
        self._ended, self._error = ended, error
        change, self._change = self._change, self._change.get_loop().create_future()
        change.set_result(None)
        if ended:
            self._on_end()
