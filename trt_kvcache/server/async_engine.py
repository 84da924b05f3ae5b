"""``AsyncEngine``: serves one session by ``start``, ``generate``, ``abort`` and ``cleanup``, for servers of any kind."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, Protocol

import numpy.typing as npt

from trt_kvcache._util.checks import int_in_range
from trt_kvcache.checkpoint import Tokenizer
from trt_kvcache.errors import ClosedError, ConfigError, QueueFullError
from trt_kvcache.generation.sampling import SamplingParams
from trt_kvcache.server.engine_request import EngineRequest
from trt_kvcache.server.engine_stats import EngineConfig, EngineObserver, EngineStats, RequestRecord
from trt_kvcache.server.generate_request import GenerateChunk
from trt_kvcache.server.guidance import Guidance, GuidanceOptions, GuidedMask
from trt_kvcache.server.guidance.grammar import Grammar
from trt_kvcache.server.shares import room_for, share_of
from trt_kvcache.session.session import InferenceSession
from trt_kvcache.session.session_thread import SessionThread

#: Estimate of the seconds that a request has a slot, until the first one has ended.
_INITIAL_SECONDS = 1.0

#: Weight of the last request in the moving average of these seconds.
_NEWEST_SHARE = 0.1


class Context(Protocol):
    """Identifies a request. The context of Dynamo's workers follows this protocol."""

    def id(self) -> str:
        """Return the id, unique among the live requests."""


class RequestContext:
    """An id for one request, to abort it by.

    Parameters
    ----------
    name : str, optional
        The id. Drawn at random if left out.
    """

    def __init__(self, name: str | None = None) -> None:
        self._name = uuid.uuid4().hex if name is None else name

    def id(self) -> str:
        """Return the id, unique among the live requests."""
        return self._name


class AsyncEngine:
    """Serves one session: token ids in, token ids and text out. It knows nothing of HTTP.

    It has the methods of an engine in NVIDIA Dynamo, which Ray Serve and Triton's Python backend can wrap: ``start``, ``generate`` (an
    asynchronous generator of dicts), ``abort`` and ``cleanup``. All methods belong to one event loop; a separate thread runs the session.

    Parameters
    ----------
    source : InferenceSession or callable
        A session, or a function that opens one, such as a :class:`~trt_kvcache.session.session_source.SessionSource`. Closed by
        :meth:`cleanup`.
    model : str
        The name of the model for clients.
    max_queue : int
        Requests that may wait for a slot; a further one is refused with :class:`QueueFullError`. Each of ``n`` answers counts. One client
        may have all places while no other client asks. Of k clients each has a share of 1/k of slots and queue: its request is accepted
        even if another client has filled the queue. That client gets no further place until it has less than its share.
    max_seconds : float, optional
        A request that lasts longer is cancelled. No limit if left out.
    observer : EngineObserver, optional
        Gets a record of each answer that ends, for metrics.
    guidance : GuidanceOptions, optional
        Limits of time and memory for the grammar of a request.

    Raises
    ------
    RangeError
        ``max_queue`` is no integer, or negative.

    Notes
    -----
    An answer does not depend on other requests: it equals the result of ``session.generate`` with the same prompt and options. A request
    whose generator is closed, or whose task is cancelled, frees its slot before the next step, as after :meth:`abort`.

    Examples
    --------
    >>> import asyncio
    >>> from trt_kvcache import InferenceSession
    >>> from trt_kvcache.server.async_engine import AsyncEngine
    >>> async def main():
    ...     engine = AsyncEngine(InferenceSession.from_model("examples/tiny-llama", engine="numpy", max_batch_size=2), model="tiny")
    ...     config = await engine.start()
    ...     request = {"token_ids": engine.tokenizer.encode("Alice was"), "stop_conditions": {"max_tokens": 4}}
    ...     async for chunk in engine.generate(request):
    ...         last = chunk
    ...     await engine.cleanup()
    ...     return config.max_num_seqs, last["finish_reason"], last["completion_usage"]["completion_tokens"]
    >>> asyncio.run(main())
    (2, 'length', 4)
    """

    def __init__(
        self,
        source: InferenceSession | Callable[[], InferenceSession],
        *,
        model: str,
        max_queue: int = 64,
        max_seconds: float | None = None,
        observer: EngineObserver | None = None,
        guidance: GuidanceOptions | None = None,
    ) -> None:
        self._max_queue = int_in_range("max_queue", max_queue, 0)
        self._max_seconds = max_seconds
        self._observer = observer
        self._model = model
        self._thread = SessionThread(source, owner="AsyncEngine")
        self._config: EngineConfig | None = None
        self._tokenizer: Tokenizer | None = None
        self._defaults = SamplingParams()
        self._guidance_options = guidance
        self._guidance: Guidance | None = None
        self._live: dict[str, EngineRequest] = {}  # by the id of the context
        self._draining = False
        self._mean_seconds = _INITIAL_SECONDS
        self._idle = asyncio.Event()

    async def start(self) -> EngineConfig:
        """Open the session, if a callable was given, and start its thread.

        Returns
        -------
        EngineConfig
            Configuration of the engine.

        Raises
        ------
        KVCacheError
            The session cannot be opened.
        ConfigError
            An adapter has the name of the model.
        """
        await self._thread.start()

        def describe(session: InferenceSession) -> EngineConfig:
            if self._model in session.adapters:
                raise ConfigError(
                    f"model: expected another name than those of the adapters, {', '.join(session.adapters)}, got {self._model!r}."
                )
            self._tokenizer, self._defaults = session.tokenizer, session.defaults
            return EngineConfig(
                model=self._model,
                context_length=session.max_sequence_length,
                max_num_seqs=session.cache.max_batch_size,
                max_queue=self._max_queue,
                vocab_size=session.vocab_size,
                eos_token_ids=session.eos_token_ids,
                has_chat_template=session.has_chat_template,
                scores_prompts=session.max_logits_per_slot > 1,
                adapters=session.adapters,
            )

        self._config = await self._thread.run(describe)
        return self._config

    @property
    def config(self) -> EngineConfig:
        """Configuration of the engine.

        Raises
        ------
        ClosedError
            Before :meth:`start`.
        """
        if self._config is None:
            raise ClosedError("this AsyncEngine: expected start() first.")
        return self._config

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, if it has one. Any thread may use it."""
        return self._tokenizer

    @property
    def draining(self) -> bool:
        """True if it takes no new requests."""
        return self._draining

    @property
    def num_live(self) -> int:
        """Number of answers that run or wait."""
        return self._places_by_client().total()

    async def generate(self, request: Mapping[str, Any], context: Context | None = None) -> AsyncGenerator[GenerateChunk, None]:
        """Answer a request. Leaving the iteration (``aclosing``) ends the request.

        Parameters
        ----------
        request : mapping
            A :class:`~trt_kvcache.server.generate_request.GenerateRequest`.
        context : Context, optional
            Identifies the request for :meth:`abort`: an object with ``id()``, unique among the live requests.

        Yields
        ------
        GenerateChunk
            New tokens of one answer. The last chunk of each answer has ``finish_reason`` and ``completion_usage``.

        Raises
        ------
        ConfigError, RangeError, ShapeError, CapacityError
            The request is not possible. Nothing has begun.
        QueueFullError
            The queue is full, and this client has its share. Nothing has begun; ``retry_after`` estimates the seconds until there is room.
        ClosedError
            The engine is draining or closed.
        ProcessorError, EngineError, CudaError
            A step of it failed.
        TimeoutError
            It lasted longer than ``max_seconds``, and was cancelled.
        """
        live = EngineRequest.read(request, self._defaults, context_length=self.config.context_length)
        name = (context or RequestContext()).id()
        if name in self._live:
            raise ConfigError(f"context: expected an id that no live request has, got {name!r}.")
        self._admit(live)
        submitted = time.perf_counter()
        self._live[name] = live
        live.start_timer(self._max_seconds)
        try:
            await self._submit(live)
            live.raise_if_expired(self._max_seconds)
            async with aclosing(live.chunks()) as chunks:
                async for chunk in chunks:
                    live.raise_if_expired(self._max_seconds)
                    yield chunk
        finally:
            live.close()
            del self._live[name]
            self._record(live, submitted)

    async def add_embeddings(self, rows: npt.ArrayLike) -> tuple[int, ...]:
        """Store rows that prompts may have in place of rows of the embedding. Waits for the running step.

        Parameters
        ----------
        rows : array_like float ``[n, hidden_size]``
            As for :meth:`InferenceSession.add_embeddings <trt_kvcache.InferenceSession.add_embeddings>`, such as the features of an image.

        Returns
        -------
        tuple of int (n,)
            Ids for ``token_ids`` of requests to :meth:`generate`. HTTP refuses them.

        Raises
        ------
        ConfigError, CapacityError, ShapeError, DTypeError, ClosedError
            As ``InferenceSession.add_embeddings``. Nothing was changed.
        """
        return await self._thread.run(lambda session: session.add_embeddings(rows))

    async def abort(self, context: Context) -> None:
        """Cancel a request: its answers finish with the reason ``"cancelled"``. A request that has ended is ignored.

        Parameters
        ----------
        context : Context
            The context that was passed to :meth:`generate`.
        """
        if context.id() in self._live:
            self._live[context.id()].abort()

    async def stats(self) -> EngineStats:
        """Return the current statistics. Waits for the running step.

        Returns
        -------
        EngineStats
            Statistics between two steps.

        Raises
        ------
        ClosedError
            It is closed.
        """
        return await self._thread.run(EngineStats.of)

    async def drain(self, seconds: float | None = None) -> None:
        """Take no new requests, and wait until the live ones have ended.

        Parameters
        ----------
        seconds : float, optional
            Timeout, after which the rest is cancelled. Waits for all if left out.
        """
        self._draining = True
        if self._live:
            self._idle.clear()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._idle.wait(), seconds)
        for live in self._live.values():
            live.abort()

    async def cleanup(self) -> None:
        """End all requests and close the session. Idempotent."""
        self._draining = True
        await self._thread.close()
        if self._guidance is not None:
            self._guidance.close()

    # --- admission: the engine bounds its requests, and refuses those that have no place ---

    def _places_by_client(self) -> Counter[str]:
        """Return the number of answers of each client that run or wait. A client without any has no entry."""
        found: Counter[str] = Counter()
        for live in self._live.values():
            found[live.client] += live.num_places
        return +found

    def _admit(self, request: EngineRequest) -> None:
        """Raise QueueFullError if there is no place for the answers of a request."""
        if self._draining:
            raise ClosedError("this engine takes no new requests: it is about to end.")
        config, taken = self.config, self._places_by_client()
        client, count, places = request.client, len(request.params), config.max_num_seqs + config.max_queue
        room = room_for(client, taken, places) if config.max_queue else places - taken.total()
        if count <= room:
            return
        if self._observer is not None:
            self._observer.refused()
        error = QueueFullError(f"queue: expected room for {count} more of {places} requests, got {room}. Try again later.")
        error.retry_after = self._seconds_to_room(client, count, taken, places)
        raise error

    def _seconds_to_room(self, client: str, count: int, taken: Counter[str], places: int) -> float:
        """Estimate when there are ``count`` places: after enough requests of any client, or enough of this client's own, have ended."""
        share, slots = share_of(client, taken, places), self.config.max_num_seqs
        to_end = count + taken.total() - places
        if self.config.max_queue and count <= share:
            own = count + taken[client] - share
            to_end = min(to_end, own * len(taken.keys() | {client}))  # each client has the same number of slots
        return max(1.0, math.ceil(self._mean_seconds * to_end / slots))

    # --- parts of generate ---

    async def _submit(self, request: EngineRequest) -> None:
        """Submit all answers of a request, once the grammar is compiled."""
        params = request.params
        if request.guided is not None:
            request.masks += self._new_masks(request)
            compiled = asyncio.wrap_future(request.masks[0].compile())
            await asyncio.wait([compiled])
            if not compiled.cancelled():  # by ``abort``
                compiled.result()
            params = tuple(_guided(one, mask) for one, mask in zip(params, request.masks, strict=True))
        request.begin(
            await self._thread.submit_answers(
                request.token_ids, params, prompt_logprobs=request.prompt_logprobs, client=request.client, adapter=request.adapter
            )
        )

    def _new_masks(self, request: EngineRequest) -> list[GuidedMask]:
        """Return a mask for each answer."""
        tokenizer, config = self._tokenizer, self.config
        if tokenizer is None:
            raise ConfigError("guided decoding: expected a model folder with tokenizer.json, got none.")
        if self._guidance is None:
            self._guidance = Guidance(
                tokenizer, config.vocab_size, config.eos_token_ids, options=self._guidance_options, max_texts=config.max_num_seqs
            )
        grammar = Grammar(request.guided or {})
        return [self._guidance.begin(grammar, ignore_eos=one.ignore_eos, client=request.client) for one in request.params]

    def _record(self, request: EngineRequest, submitted: float) -> None:
        """Report each answer to the observer, and wake ``drain`` after the last request."""
        for one in request.answers:
            record = RequestRecord(
                prompt_tokens=len(one.handle.prompt),
                cached_tokens=one.handle.reused_tokens,
                generated_tokens=len(one.tokens),
                submitted=submitted,
                times=one.times,
                finish_reason=one.finish_reason or ("error" if one.ended else "cancelled"),
                started=one.handle.started,
            )
            if record.times and record.started is not None:
                self._mean_seconds += _NEWEST_SHARE * (record.times[-1] - record.started - self._mean_seconds)
            if self._observer is not None:
                self._observer.ended(record)
        if not self._live:
            self._idle.set()


def _guided(params: SamplingParams, mask: GuidedMask) -> SamplingParams:
    """Return parameters with a mask. The grammar decides when a text may end, so end tokens are not ignored."""
    return replace(params, logits_processors=(*params.logits_processors, mask), ignore_eos=False)
