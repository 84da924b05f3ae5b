"""``RemoteEngine``: the replicas of a deployment as one engine."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextvars import Context
from typing import Any, TypeVar

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from trt_kvcache.checkpoint import Tokenizer
from trt_kvcache.errors import ClosedError, QueueFullError
from trt_kvcache.server.engine_stats import EngineConfig, EngineObserver, EngineStats, RequestRecord
from trt_kvcache.server.generate_request import GenerateChunk

#: Attempts at a request whose replica dies before its first chunk.
_ATTEMPTS = 5

_T = TypeVar("_T")


class RemoteEngine:
    """Sends requests to the replicas of a deployment: an :class:`~trt_kvcache.server.engine_client.EngineClient`."""

    def __init__(self, handle: DeploymentHandle, *, tokenizer: Tokenizer | None, observer: EngineObserver | None = None) -> None:
        self._handle = handle
        self._tokenizer = tokenizer
        self._observer = observer
        self._config: EngineConfig | None = None
        self._draining = False

    async def start(self) -> EngineConfig:
        """Wait for a replica, and return its configuration."""
        self._config = await _in_new_context(self._handle.config.remote)
        assert self._config is not None
        return self._config

    @property
    def config(self) -> EngineConfig:
        """Configuration of each replica."""
        if self._config is None:
            raise ClosedError("this RemoteEngine: expected start() first.")
        return self._config

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, if it has one."""
        return self._tokenizer

    @property
    def draining(self) -> bool:
        """True if it takes no new requests."""
        return self._draining

    async def generate(self, request: Mapping[str, Any]) -> AsyncGenerator[GenerateChunk, None]:
        """Answer a request by a replica. If that dies before the first chunk, another one answers; later, raise ClosedError."""
        for attempt in range(_ATTEMPTS):
            answers = _Answers(len(request["token_ids"]))
            response = _in_new_context(lambda: self._handle.options(stream=True).generate.remote(dict(request)))
            try:
                async for chunk in response:
                    if isinstance(chunk, Exception):
                        raise self._counted(chunk)
                    answers.add(chunk)
                    yield chunk
                return
            except RayActorError:
                if answers.begun or attempt == _ATTEMPTS - 1:
                    raise ClosedError("engine: the replica that ran this request has ended. Send it again.") from None
            except BackPressureError:
                raise self._counted(QueueFullError("queue: expected room in one of the replicas, got none. Try again later.")) from None
            except DeploymentUnavailableError:
                raise ClosedError("engine: no replica can be started.") from None
            finally:
                response.cancel()
                if self._observer is not None:
                    for record in answers.records():
                        self._observer.ended(record)

    async def stats(self) -> EngineStats:
        """Return the statistics of all replicas: sums, and all slots."""
        return EngineStats.together(await _in_new_context(lambda: self._handle.broadcast("stats")).results_async())

    async def cleanup(self) -> None:
        """Refuse new requests. The replicas end with the application."""
        self._draining = True

    def _counted(self, error: Exception) -> Exception:
        """Return an error, and count it if it is a full queue."""
        if isinstance(error, QueueFullError) and self._observer is not None:
            self._observer.refused()
        return error


class _Answers:
    """Times and ends of the answers to one prompt, for records."""

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._submitted = time.perf_counter()
        self._times: dict[int, list[float]] = {}
        self._ends: dict[int, GenerateChunk] = {}

    @property
    def begun(self) -> bool:
        """True after the first chunk."""
        return bool(self._times)

    def add(self, chunk: GenerateChunk) -> None:
        """Record a chunk."""
        self._times.setdefault(chunk["index"], []).extend([time.perf_counter()] * len(chunk["token_ids"]))
        if "finish_reason" in chunk:
            self._ends[chunk["index"]] = chunk

    def records(self) -> list[RequestRecord]:
        """Return a record of each answer that has begun."""
        return [self._record(index, tuple(times)) for index, times in self._times.items()]

    def _record(self, index: int, times: tuple[float, ...]) -> RequestRecord:
        end = self._ends.get(index)
        usage: dict[str, Any] = {} if end is None else end["completion_usage"]
        return RequestRecord(
            prompt_tokens=self._prompt_tokens,
            cached_tokens=usage.get("prompt_tokens_details", {}).get("cached_tokens", 0),
            generated_tokens=len(times),
            submitted=self._submitted,
            times=times,
            finish_reason="cancelled" if end is None else end["finish_reason"],
        )


def _in_new_context(call: Callable[[], _T]) -> _T:
    """Call a deployment outside of the current request context: Ray's router confuses two concurrent calls of one HTTP request."""
    return Context().run(call)
