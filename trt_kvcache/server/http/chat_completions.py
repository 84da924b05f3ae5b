"""``POST /v1/chat/completions``: the next message of a conversation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from trt_kvcache.server.generate_request import GenerateChunk
from trt_kvcache.server.http.bodies import ChatBody
from trt_kvcache.server.http.connection import unless_disconnected
from trt_kvcache.server.http.generation import Generation
from trt_kvcache.server.http.service import Service
from trt_kvcache.server.http.tool_answers import AnswerParser, AnswerTools


def chat_route(service: Service) -> APIRouter:
    """Return a router with the route."""
    router = APIRouter(route_class=service.bodies.route())

    @router.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatBody, request: Request) -> Response:
        service.adapter_of(body.model)  # first of all, so that another model costs nothing
        service.check_answers(1, body.n)
        tools = None if body.tool_choice == "none" else body.tools
        conversation = service.conversation(
            body.messages,
            tools,
            body.template_args,
            add_generation_prompt=body.add_generation_prompt,
            client=request.state.client,
        )
        tokens = service.checked_prompt(await unless_disconnected(request, conversation))
        return await _Chat(service, body, tokens, request.state.client).response(request)

    return router


class _Chat(Generation):
    """One conversation to continue."""

    id_prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, body: ChatBody, prompt: list[int], client: str) -> None:
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        request = body.request(prompt, max_tokens=limit, logprobs=logprobs)
        self._tools = AnswerTools(service, body)
        if self._tools.guided is not None:
            request["sampling_options"]["guided_decoding"] = self._tools.guided
        super().__init__(service, body, [request], client)
        self._with_logprobs = bool(body.logprobs)
        self._prompt = prompt
        self._begun: dict[int, AnswerParser] = {}  # the answers of a stream, by index

    def choices(self, answers: Sequence[Sequence[GenerateChunk]]) -> list[dict[str, Any]]:
        """Return a message for each answer."""
        found = []
        for index, answer in enumerate(answers[0]):
            parser = self._tools.parser(self._prompt)
            message = {"role": "assistant", **parser.message(answer), "refusal": None}
            logprobs, reason = self._logprobs(answer), parser.finish_reason(answer)
            found.append({"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason})
        return found

    def chunk_choices(self, prompt: int, chunk: GenerateChunk) -> Iterator[dict[str, Any]]:
        """Yield the role first, then the deltas of content and tool calls, then the finish reason."""
        index = chunk["index"]
        if index not in self._begun:
            self._begun[index] = self._tools.parser(self._prompt)
            yield _choice(index, {"role": "assistant", "content": ""})
        logprobs = self._logprobs(chunk)
        for delta in self._begun[index].deltas(chunk):
            yield _choice(index, delta, logprobs=logprobs)
            logprobs = None  # once for all deltas of a chunk
        if "finish_reason" in chunk:
            yield _choice(index, {}, reason=self._begun[index].finish_reason(chunk))

    def _logprobs(self, chunk: GenerateChunk) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        content = []
        for token, value, top in zip(chunk["token_ids"], chunk.get("log_probs", ()), chunk.get("top_logprobs", ()), strict=True):
            likely = [self._token(one["token_id"], one["logprob"]) for one in top]
            content.append({**self._token(token, value), "top_logprobs": likely})
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        found = self._service.token_bytes(token)
        return {"token": self._service.token_text(token), "logprob": logprob, "bytes": None if found is None else list(found)}


def _choice(index: int, delta: dict[str, Any], *, logprobs: dict[str, Any] | None = None, reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
