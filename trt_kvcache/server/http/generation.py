"""``Generation``: a request for generated text, answered by one document or by a stream of events."""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, ClassVar

from fastapi import Request
from starlette.responses import Response

from trt_kvcache.server.generate_request import GenerateChunk
from trt_kvcache.server.http.answers import Usage, chunks_of, size_of, whole_answers
from trt_kvcache.server.http.api_errors import as_api_error
from trt_kvcache.server.http.bodies import Sampling
from trt_kvcache.server.http.connection import event_stream, unless_disconnected
from trt_kvcache.server.http.service import Service
from trt_kvcache.server.http.written import as_json, dumped

#: The last event of a stream.
_DONE = b"data: [DONE]\n\n"


class Generation(ABC):
    """One request. Subclasses write answers of the engine as the ``choices`` of their route."""

    id_prefix: ClassVar[str]
    object: ClassVar[str]  # of a whole document
    chunk_object: ClassVar[str]  # of an event

    def __init__(self, service: Service, body: Sampling, requests: Sequence[Mapping[str, Any]], client: str) -> None:
        self._service = service
        self._with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        self._stream = bool(body.stream)
        adapter = service.adapter_of(body.model)
        self._requests = [{**request, "client": client, "adapter": adapter} for request in requests]  # to the engine: one for each prompt
        self._head = {"id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": adapter or service.model}

    @abstractmethod
    def choices(self, answers: Sequence[Sequence[GenerateChunk]]) -> list[dict[str, Any]]:
        """Return the choices of a document, of the whole answers to each prompt."""

    @abstractmethod
    def chunk_choices(self, prompt: int, chunk: GenerateChunk) -> Iterator[dict[str, Any]]:
        """Yield the choice of each event for the next chunk of an answer."""

    async def response(self, request: Request) -> Response:
        """Run the prompts, as long as the client waits."""
        if self._stream:
            return await event_stream(request, self._events(), stalled_seconds=self._service.options.stalled_seconds)
        return Response(await unless_disconnected(request, self._document()), media_type="application/json")

    async def _document(self) -> bytes:
        found, usage = await whole_answers(self._service.engine, self._requests)

        def document() -> bytes:
            return as_json({**self._head, "object": self.object, "choices": self.choices(found), "usage": usage.document})

        return await self._service.off_loop(sum(size_of(answer) for answers in found for answer in answers), document)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        head: dict[str, Any] = {**self._head, "object": self.chunk_object}
        usage, begun = Usage(), False

        def events(prompt: int, chunk: GenerateChunk) -> list[bytes]:
            usage_so_far = {"usage": None} if self._with_usage else {}  # the last event has the usage
            is_long = chunk.get("prompt_logprobs") is not None
            return [_event({**head, "choices": [choice], **usage_so_far}, is_long=is_long) for choice in self.chunk_choices(prompt, chunk)]

        try:
            async with aclosing(chunks_of(self._service.engine, self._requests)) as chunks:
                async for prompt, chunk in chunks:
                    begun = True
                    if "completion_usage" in chunk:
                        usage.add(prompt, chunk["completion_usage"])
                    for event in await self._service.off_loop(size_of(chunk), partial(events, prompt, chunk)):
                        yield event
        except (GeneratorExit, asyncio.CancelledError):
            raise
        except BaseException as error:
            if not begun:  # the response gets a status of its own
                raise
            yield _event(as_api_error(error).body)
            return
        if self._with_usage:
            yield _event({**head, "choices": [], "usage": usage.document})
        yield _DONE


def _event(document: dict[str, Any], *, is_long: bool = False) -> bytes:
    """Return a document as a server-sent event; a long one is written in pieces."""
    text = as_json(document) if is_long else dumped(document).encode("utf-8", "replace")
    return b"data: " + text + b"\n\n"
