"""``POST /v1/chat/completions``: conversations answered."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from trt_kvcache.server.http.answers import Answer, Usage, chunks_of, whole_answers
from trt_kvcache.server.http.bodies import ChatBody
from trt_kvcache.server.http.connection import event_stream, unless_disconnected
from trt_kvcache.server.http.errors import as_api_error
from trt_kvcache.server.http.service import DONE, Service, as_event
from trt_kvcache.server.http.tool_answers import AnswerParts, AnswerTools
from trt_kvcache.server.http.written import as_json


def chat_route(service: Service) -> APIRouter:
    """Return the route."""
    router = APIRouter(route_class=service.bodies.route())

    @router.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatBody, request: Request) -> Response:
        service.check_model(body.model)
        service.check_answers(1, body.n)
        tools = None if body.tool_choice == "none" else body.tools
        conversation = service.conversation(
            body.messages,
            tools,
            body.template_args,
            add_generation_prompt=body.add_generation_prompt,
            client=request.state.client,
        )
        tokens = await unless_disconnected(request, conversation)
        answer = _Chat(service, body, service.checked(tokens), request.state.client)
        if body.stream:
            return await event_stream(request, answer.events(), stalled_seconds=service.options.stalled_seconds)
        return Response(await unless_disconnected(request, answer.document()), media_type="application/json")

    return router


class _Chat:
    """One request for the next message of a conversation."""

    def __init__(self, service: Service, body: ChatBody, prompt: list[int], client: str) -> None:
        self._service = service
        self._body = body
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        self._tools = AnswerTools(service, body)
        self._prompt = prompt
        self._request = {**body.request(prompt, max_tokens=limit, logprobs=logprobs), "client": client}
        if (guided := self._tools.guided) is not None:
            self._request["sampling_options"]["guided_decoding"] = guided
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": service.model}

    async def document(self) -> bytes:
        """Return the whole answer."""
        [answers], usage = await whole_answers(self._service.engine, [self._request])
        size = sum(answer.size for answer in answers)
        return await self._service.away(size, lambda: as_json(self._document(answers, usage)))

    def _document(self, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(answers):
            parts = self._tools.parts(self._prompt)
            message = parts.message(answer)
            choices.append(
                {
                    "index": index,
                    "message": {"role": "assistant", **message, "refusal": None},
                    "logprobs": self._logprobs(answer),
                    "finish_reason": parts.finish_reason(answer),
                }
            )
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage.document}

    def _logprobs(self, answer: Answer) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        content = []
        for token, value, top in zip(answer.token_ids, answer.log_probs, answer.top_logprobs, strict=True):
            likely = [self._token(one["token_id"], one["logprob"]) for one in top]
            content.append({**self._token(token, value), "top_logprobs": likely})
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        found = self._service.token_bytes(token)
        return {"token": self._service.token_text(token), "logprob": logprob, "bytes": None if found is None else list(found)}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream."""
        options = self._body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        head = {**self._head, "object": "chat.completion.chunk"}
        usage, begun = Usage(), dict[int, AnswerParts]()
        try:
            async with aclosing(chunks_of(self._service.engine, [self._request])) as chunks:
                async for _, chunk in chunks:
                    index = chunk["index"]
                    answer = Answer()
                    answer.add(chunk)
                    if index not in begun:
                        begun[index] = self._tools.parts(self._prompt)
                        yield self._event(head, with_usage, [_choice(index, {"role": "assistant", "content": ""}, None, None)])
                    logprobs = self._logprobs(answer)
                    for delta in begun[index].deltas(answer):
                        yield self._event(head, with_usage, [_choice(index, delta, logprobs, None)])
                        logprobs = None
                    if answer.finish_reason:
                        usage.add(0, answer.usage)
                        yield self._event(head, with_usage, [_choice(index, {}, None, begun[index].finish_reason(answer))])
        except (GeneratorExit, asyncio.CancelledError):
            raise
        except BaseException as error:
            if not begun:
                raise
            yield as_event(as_api_error(error).body)
            return
        if with_usage:
            yield as_event({**head, "choices": [], "usage": usage.document})
        yield DONE

    def _event(self, head: dict[str, Any], with_usage: bool, choices: Sequence[dict[str, Any]]) -> bytes:
        return as_event({**head, "choices": choices, "usage": None} if with_usage else {**head, "choices": choices})


def _choice(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
