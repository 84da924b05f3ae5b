"""``AsyncEngine``: a session behind ``start``, ``generate``, ``abort`` and ``cleanup``, for servers of any kind."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, Protocol

from trt_kvcache._util.checks import int_in_range
from trt_kvcache.checkpoint import Tokenizer
from trt_kvcache.errors import ClosedError, ConfigError, QueueFullError
from trt_kvcache.generation.request import GeneratedToken
from trt_kvcache.generation.sampling import SamplingParams
from trt_kvcache.server.engine_stats import EngineConfig, EngineObserver, EngineStats, RequestRecord
from trt_kvcache.server.generate_request import GenerateChunk, WantedAnswers, read_request
from trt_kvcache.server.guidance import Guidance, GuidanceOptions, GuidedMask
from trt_kvcache.server.guidance.grammar import Grammar
from trt_kvcache.server.shares import room_for, share_of
from trt_kvcache.session.async_request import AsyncRequest
from trt_kvcache.session.async_session import AsyncSession
from trt_kvcache.session.session import InferenceSession

#: Seconds that a request is taken to have a slot before the first one has ended.
_FIRST_GUESS = 1.0

#: Share of the last request in the mean of their seconds.
_NEWEST_SHARE = 0.1


class Context(Protocol):
    """What identifies a request from outside: that of Dynamo's workers fits."""

    def id(self) -> str:
        """Return its name."""


class RequestContext:
    """A name for one request, to abort it by.

    Parameters
    ----------
    name : str, optional
        Drawn if left out.
    """

    def __init__(self, name: str | None = None) -> None:
        self._name = uuid.uuid4().hex if name is None else name

    def id(self) -> str:
        """Return its name."""
        return self._name


class AsyncEngine:
    """Serves one session: token ids in, token ids and text out. It knows nothing of HTTP.

    The shape is that of an engine in NVIDIA Dynamo, and of what Ray Serve and Triton's Python backend wrap: ``start``, ``generate`` as an
    asynchronous generator of dicts, ``abort``, ``cleanup``. All methods belong to one event loop; a thread of its own runs the session.

    Parameters
    ----------
    source : InferenceSession or callable
        A session, or what opens one, such as a :class:`~trt_kvcache.session.session_source.SessionSource`. Closed by :meth:`cleanup`.
    model : str
        The name that it is served under.
    max_queue : int
        Requests that may wait for a slot; a further one is refused with :class:`QueueFullError`. Each of ``n``
        answers counts. One client may have all places while nobody else wants one. Of k clients each has a k-th of slots and queue in any
        case, so its request is taken even where another one has filled them; that one gets no further place before it has less than its
        share again.
    max_seconds : float, optional
        A request that lasts longer is cancelled. No limit if left out.
    observer : EngineObserver, optional
        Is told of each answer that ends, for metrics.
    guidance : GuidanceOptions, optional
        What the grammar of a request may cost.

    Raises
    ------
    RangeError
        ``max_queue`` is no integer, or negative.

    Notes
    -----
    An answer is what ``session.generate`` makes of its prompt and options alone, whatever runs beside it. A request whose generator is
    closed, or whose task is cancelled, leaves its slot before the next step, as after :meth:`abort`.

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
        self._session = AsyncSession(source, max_requests=2**31 - 1)  # the bound is ours
        self._config: EngineConfig | None = None
        self._tokenizer: Tokenizer | None = None
        self._defaults = SamplingParams()
        self._guidance_options = guidance
        self._guidance: Guidance | None = None
        self._live: dict[str, list[AsyncRequest]] = {}
        self._masks: dict[str, list[GuidedMask]] = {}
        self._clients: dict[str, str] = {}  # of the live requests
        self._aborted: set[str] = set()
        self._reserved: Counter[str] = Counter()  # by client
        self._draining = False
        self._mean_seconds = _FIRST_GUESS
        self._idle = asyncio.Event()

    async def start(self) -> EngineConfig:
        """Open the session, if a callable was given, and start its thread.

        Returns
        -------
        EngineConfig
            What it is.

        Raises
        ------
        KVCacheError
            The session cannot be opened.
        """
        await self._session.start()

        def describe(session: InferenceSession) -> EngineConfig:
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
            )

        self._config = await self._session.run(describe)
        return self._config

    @property
    def config(self) -> EngineConfig:
        """What it is.

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
        """Whether it takes no new requests."""
        return self._draining

    @property
    def num_live(self) -> int:
        """Answers that run or wait."""
        return sum(self._live_by_client().values())

    async def generate(self, request: Mapping[str, Any], context: Context | None = None) -> AsyncGenerator[GenerateChunk, None]:
        """Answer a request. Leaving the iteration (``aclosing``) ends the request.

        Parameters
        ----------
        request : mapping
            A :class:`~trt_kvcache.server.generate_request.GenerateRequest`.
        context : Context, optional
            What :meth:`abort` is to know it by: an object with ``id()``, unique among the live requests.

        Yields
        ------
        GenerateChunk
            New tokens of one answer. The last chunk of each answer has ``finish_reason`` and ``completion_usage``.

        Raises
        ------
        ConfigError, RangeError, ShapeError, CapacityError
            The request is not possible. Nothing has begun.
        QueueFullError
            As many requests wait as may, and this client has its share. Nothing has begun; ``retry_after`` says when it may have room.
        ClosedError
            It is draining or closed.
        ProcessorError, EngineError, CudaError
            A step of it failed.
        TimeoutError
            It lasted longer than ``max_seconds``, and was cancelled.
        """
        wanted = read_request(request, self._defaults, context_length=self.config.context_length)
        name = (context or RequestContext()).id()
        if name in self._live:
            raise ConfigError(f"context: expected an id that no live request has, got {name!r}.")
        self._admit(wanted.client, len(wanted.params))
        submitted = time.perf_counter()
        requests = self._live[name] = []
        masks = self._masks[name] = []
        timer = _Timer(self._max_seconds, requests, masks)
        self._clients[name] = wanted.client
        try:
            await self._submit(wanted, requests, masks)
            timer.check()
            if name in self._aborted:  # while it was submitted
                _cancel(requests, masks)
            async with aclosing(_chunks(requests, wanted)) as chunks:
                async for chunk in chunks:
                    timer.check()
                    yield chunk
        finally:
            timer.cancel()
            for one in requests:
                if not one.ended:
                    one.cancel()
            for mask in masks:
                mask.close()
            del self._live[name], self._masks[name], self._clients[name]
            self._aborted.discard(name)
            self._record(requests, submitted)

    async def abort(self, context: Context) -> None:
        """End a request where it is: its answers finish with the reason ``"cancelled"``. Nothing happens if it has ended.

        Parameters
        ----------
        context : Context
            As it was passed to :meth:`generate`.
        """
        if context.id() in self._live:
            self._abort(context.id())

    async def stats(self) -> EngineStats:
        """Return what it does now. Waits for the step that runs.

        Returns
        -------
        EngineStats
            Between two steps.

        Raises
        ------
        ClosedError
            It is closed.
        """
        return await self._session.run(EngineStats.of)

    async def drain(self, seconds: float | None = None) -> None:
        """Take no new requests, and wait until those that were taken have ended.

        Parameters
        ----------
        seconds : float, optional
            After so many, those that are left are cancelled. Waits for all if left out.
        """
        self._draining = True
        if self._live or self._reserved:
            self._idle.clear()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._idle.wait(), seconds)
        for name in self._live:
            self._abort(name)

    async def cleanup(self) -> None:
        """End all requests and close the session. Idempotent."""
        self._draining = True
        await self._session.close()
        if self._guidance is not None:
            self._guidance.close()

    # --- parts of the above ---

    def _abort(self, name: str) -> None:
        """Cancel a request: what was submitted of it, and what is about to be."""
        self._aborted.add(name)
        _cancel(self._live[name], self._masks[name])

    def _live_by_client(self) -> Counter[str]:
        """Return how many answers of each client run or wait. A client without any is not there."""
        found = Counter(self._reserved)
        for name, requests in self._live.items():
            found[self._clients[name]] += sum(not one.ended for one in requests)
        return +found

    def _admit(self, client: str, count: int) -> None:
        """Reserve room for so many answers, or raise."""
        if self._draining:
            raise ClosedError("this engine takes no new requests: it is about to end.")
        config, live = self.config, self._live_by_client()
        places = config.max_num_seqs + config.max_queue
        room = room_for(client, live, places) if config.max_queue else places - live.total()
        if count > room:
            if self._observer is not None:
                self._observer.refused()
            error = QueueFullError(f"queue: expected room for {count} more of {places} requests, got {room}. Try again later.")
            error.retry_after = self._seconds_to_room(client, count, live, places)
            raise error
        self._reserved[client] += count

    def _seconds_to_room(self, client: str, count: int, live: Counter[str], places: int) -> float:
        """Return after how long so many answers may have room: when enough of any clients have ended, or enough of this client's own."""
        share, slots = share_of(client, live, places), self.config.max_num_seqs
        to_end = count + live.total() - places
        if self.config.max_queue and count <= share:
            own = count + live[client] - share
            to_end = min(to_end, own * len(live.keys() | {client}))  # of the slots it has as many as each of the others
        return max(1.0, math.ceil(self._mean_seconds * to_end / slots))

    async def _submit(self, wanted: WantedAnswers, requests: list[AsyncRequest], masks: list[GuidedMask]) -> None:
        """Submit all answers at once; what was reserved for them becomes them."""
        try:
            params = wanted.params
            if wanted.guided is not None:
                masks += self._new_masks(wanted)
                compiled = asyncio.wrap_future(masks[0].compile())
                await asyncio.wait([compiled])
                if not compiled.cancelled():  # by ``abort``
                    compiled.result()
                params = tuple(_guided(one, mask) for one, mask in zip(params, masks, strict=True))
            requests += await self._session.submit_answers(
                wanted.token_ids, params, prompt_logprobs=wanted.prompt_logprobs, client=wanted.client
            )
        finally:
            self._reserved[wanted.client] -= len(wanted.params)
            if not self._reserved[wanted.client]:
                del self._reserved[wanted.client]

    def _new_masks(self, wanted: WantedAnswers) -> list[GuidedMask]:
        """Return what restricts each answer."""
        tokenizer, config = self._tokenizer, self.config
        if tokenizer is None:
            raise ConfigError("guided decoding: expected a model folder with tokenizer.json, got none.")
        if self._guidance is None:
            self._guidance = Guidance(
                tokenizer, config.vocab_size, config.eos_token_ids, options=self._guidance_options, max_texts=config.max_num_seqs
            )
        grammar = Grammar(wanted.guided or {})
        return [self._guidance.begin(grammar, ignore_eos=one.ignore_eos, client=wanted.client) for one in wanted.params]

    def _record(self, requests: Sequence[AsyncRequest], submitted: float) -> None:
        for one in requests:
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
        if not self._live and not self._reserved:
            self._idle.set()


def _guided(params: SamplingParams, mask: GuidedMask) -> SamplingParams:
    """Return parameters with a mask, which knows when a text may end."""
    return replace(params, logits_processors=(*params.logits_processors, mask), ignore_eos=False)


def _cancel(requests: Sequence[AsyncRequest], masks: Sequence[GuidedMask]) -> None:
    """End requests, and what they wait for."""
    for one in requests:
        one.cancel()
    for mask in masks:
        mask.cancel()


class _Timer:
    """Cancels requests after some seconds, and what they wait for before they begin."""

    def __init__(self, seconds: float | None, requests: Sequence[AsyncRequest], masks: Sequence[GuidedMask]) -> None:
        self._seconds = seconds
        self._expired = False
        self._requests = requests
        self._masks = masks
        self._handle = None if seconds is None else asyncio.get_running_loop().call_later(seconds, self._expire)

    def _expire(self) -> None:
        self._expired = not self._requests or any(not one.ended for one in self._requests)
        _cancel(self._requests, self._masks)

    def check(self) -> None:
        """Raise TimeoutError if it has cancelled a request."""
        if self._expired:
            raise TimeoutError(f"request: expected to end within {self._seconds:g} seconds; it was cancelled. Ask for fewer tokens.")

    def cancel(self) -> None:
        """Do nothing when the time comes."""
        if self._handle is not None:
            self._handle.cancel()


async def _chunks(requests: Sequence[AsyncRequest], wanted: WantedAnswers) -> AsyncGenerator[GenerateChunk, None]:
    """Yield the chunks of all answers, each as soon as it is there."""
    counts = [0] * len(requests)
    if len(requests) == 1:
        last: GenerateChunk | None = None
        while last is None or "finish_reason" not in last:
            last = _chunk(0, requests[0], await requests[0].read(counts[0]), counts, wanted)
            yield last
        return
    reads = {asyncio.create_task(request.read(0)): index for index, request in enumerate(requests)}
    try:
        while reads:
            done, _ = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=reads.__getitem__):
                index = reads[task]
                chunk = _chunk(index, requests[index], task.result(), counts, wanted)
                del reads[task]
                yield chunk
                if "finish_reason" not in chunk:
                    reads[asyncio.create_task(requests[index].read(counts[index]))] = index
    finally:
        for task in reads:
            task.cancel()
        await asyncio.gather(*reads, return_exceptions=True)  # several may have failed: asyncio would complain of all but the first


def _chunk(index: int, request: AsyncRequest, new: Sequence[GeneratedToken], counts: list[int], wanted: WantedAnswers) -> GenerateChunk:
    """Return the chunk of new tokens of an answer; none if it was cancelled."""
    shown = [] if wanted.scores_only else new
    chunk = GenerateChunk(index=index, token_ids=[event.token for event in shown], text="".join([event.text for event in shown]))
    if shown and wanted.params[index].logprobs is not None:
        chunk["log_probs"] = [event.logprob or 0.0 for event in shown]
        chunk["top_logprobs"] = [[{"token_id": token, "logprob": value} for token, value in event.top_logprobs or ()] for event in shown]
    if index == 0 and not counts[0] and wanted.prompt_logprobs is not None and new:
        chunk["prompt_logprobs"] = request.handle.prompt_score
    counts[index] += len(new)
    reason = new[-1].finish_reason if new else "cancelled"
    if reason is not None:
        completion = 0 if wanted.scores_only else counts[index]
        prompt = len(request.handle.prompt)
        chunk["finish_reason"] = "length" if wanted.scores_only and new else reason
        chunk["completion_usage"] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": request.handle.reused_tokens},
        }
    return chunk
