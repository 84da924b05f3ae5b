"""``POST /v1/completions``: texts and token ids continued, prompts scored."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from trt_kvcache.generation.prompt_score import PromptScore
from trt_kvcache.server.http.answers import Answer, Usage, chunks_of, whole_answers
from trt_kvcache.server.http.bodies import CompletionBody
from trt_kvcache.server.http.connection import event_stream, unless_disconnected
from trt_kvcache.server.http.errors import as_api_error
from trt_kvcache.server.http.service import DONE, Service, as_event
from trt_kvcache.server.http.text_places import TextPlaces
from trt_kvcache.server.http.written import as_json

#: Tokens and values of a prompt and what follows it, as the API lists them.
_Logprobs = dict[str, list[Any]]


def completions_route(service: Service) -> APIRouter:
    """Return the route."""
    router = APIRouter(route_class=service.bodies.route())

    @router.post("/v1/completions", response_model=None)
    async def completions(body: CompletionBody, request: Request) -> Response:
        service.check_model(body.model)
        completion = _Completion(service, body, await _prompt_ids(service, body), request.state.client)
        if body.stream:
            return await event_stream(request, completion.events(), stalled_seconds=service.options.stalled_seconds)
        return Response(await unless_disconnected(request, completion.document()), media_type="application/json")

    return router


async def _prompt_ids(service: Service, body: CompletionBody) -> list[list[int]]:
    prompts = body.prompts
    service.check_answers(len(prompts), body.n)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    tokens = [prompt for prompt in prompts if not isinstance(prompt, str)]
    tokens += await service.encoded(texts, add_special_tokens=body.add_special_tokens)
    return [service.checked(prompt) for prompt in tokens]


class _Completion:
    """One request for completions."""

    def __init__(self, service: Service, body: CompletionBody, prompts: list[list[int]], client: str) -> None:
        self._service = service
        self._body = body
        self._prompts = prompts
        self._count = body.n or 1
        scored = body.logprobs if body.echo and body.logprobs is not None else None
        self._requests = [
            {**body.request(tokens, max_tokens=body.max_tokens, logprobs=body.logprobs, prompt_logprobs=scored), "client": client}
            for tokens in prompts
        ]
        self._head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()), "model": service.model}

    async def document(self) -> bytes:
        """Return the whole answer."""
        found, usage = await whole_answers(self._service.engine, self._requests)
        size = sum(answer.size for answers in found for answer in answers)
        return await self._service.away(size, lambda: as_json(self._document(found, usage)))

    def _document(self, found: Sequence[Sequence[Answer]], usage: Usage) -> dict[str, Any]:
        choices = []
        for prompt, answers in enumerate(found):
            for index, answer in enumerate(answers):
                logprobs = self._logprobs(prompt, answers[0].prompt_logprobs, answer, self._places(prompt))
                choices.append(self._choice(prompt, index, answer, logprobs, echo=True))
        return {**self._head, "choices": choices, "usage": usage.document}

    def _choice(self, prompt: int, index: int, answer: Answer, logprobs: _Logprobs | None, *, echo: bool) -> dict[str, Any]:
        text = self._echoed(prompt) + answer.text if echo else answer.text
        reason = answer.finish_reason or None
        return {"index": prompt * self._count + index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _echoed(self, prompt: int) -> str:
        """Return what is repeated of a prompt."""
        if not self._body.echo:
            return ""
        given = self._body.prompts[prompt]
        return given if isinstance(given, str) else self._service.tokenizer.decode(given)

    def _places(self, prompt: int) -> TextPlaces:
        """Return the places of tokens in the text of an answer, before its first one."""
        return TextPlaces(self._service.engine.tokenizer, context=() if self._body.echo else self._prompts[prompt])

    def _logprobs(self, prompt: int, score: PromptScore | None, answer: Answer, places: TextPlaces) -> _Logprobs | None:
        """Return log-probabilities of a prompt that is repeated, and of what follows it."""
        if self._body.logprobs is None:
            return None
        found: _Logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if score is not None:
            tops: Sequence[Any] = score.top_logprobs or [None] * len(score.tokens)
            for token, value, top in zip(score.tokens, score.logprobs, tops, strict=True):
                self._add(found, token, value, dict(top or ()), places)
            places.go_to(len(self._echoed(prompt)))
        for token, value, likely in zip(answer.token_ids, answer.log_probs, answer.top_logprobs, strict=True):
            self._add(found, token, value, {one["token_id"]: one["logprob"] for one in likely}, places)
        return found

    def _add(self, found: _Logprobs, token: int, value: float | None, top: dict[int, float], places: TextPlaces) -> None:
        text = self._service.token_text(token)
        found["tokens"].append(text)
        found["token_logprobs"].append(value)
        found["text_offset"].append(places.of(token))
        likely = {self._service.token_text(one): logprob for one, logprob in top.items()}
        found["top_logprobs"].append(None if value is None else {**likely, text: value})

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream."""
        options = self._body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        head = {**self._head, "usage": None} if with_usage else self._head
        usage, places, begun = Usage(), dict[tuple[int, int], TextPlaces](), False
        try:
            async with aclosing(chunks_of(self._service.engine, self._requests)) as chunks:
                async for prompt, chunk in chunks:
                    begun = True
                    answer = Answer()
                    answer.add(chunk)
                    if "completion_usage" in chunk:
                        usage.add(prompt, chunk["completion_usage"])
                    yield await self._service.away(answer.size, partial(self._event, head, prompt, chunk["index"], answer, places))
        except (GeneratorExit, asyncio.CancelledError):
            raise
        except BaseException as error:
            if not begun:
                raise
            yield as_event(as_api_error(error).body)
            return
        if with_usage:
            yield as_event({**self._head, "choices": [], "usage": usage.document})
        yield DONE

    def _event(self, head: dict[str, Any], prompt: int, index: int, answer: Answer, places: dict[tuple[int, int], TextPlaces]) -> bytes:
        document = {**head, "choices": [self._part(prompt, index, answer, places)]}
        return as_event(document, is_long=answer.prompt_logprobs is not None)

    def _part(self, prompt: int, index: int, answer: Answer, places: dict[tuple[int, int], TextPlaces]) -> dict[str, Any]:
        """Return the next part of an answer; the first one repeats the prompt, if asked for."""
        first = (prompt, index) not in places
        if first:
            places[prompt, index] = self._places(prompt)
        logprobs = self._logprobs(prompt, answer.prompt_logprobs, answer, places[prompt, index])
        return self._choice(prompt, index, answer, logprobs, echo=first)
