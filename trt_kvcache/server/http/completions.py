"""``POST /v1/completions``: texts and token ids continued, prompts scored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from trt_kvcache.generation.prompt_score import PromptScore
from trt_kvcache.server.generate_request import GenerateChunk
from trt_kvcache.server.http.bodies import CompletionBody
from trt_kvcache.server.http.generation import Generation
from trt_kvcache.server.http.service import Service
from trt_kvcache.server.http.text_places import TextPlaces

#: The ``logprobs`` object of OpenAI's API: four lists with an element for each token.
_Logprobs = dict[str, list[Any]]


def completions_route(service: Service) -> APIRouter:
    """Return a router with the route."""
    router = APIRouter(route_class=service.bodies.route())

    @router.post("/v1/completions", response_model=None)
    async def completions(body: CompletionBody, request: Request) -> Response:
        service.adapter_of(body.model)  # first of all, so that another model costs nothing
        return await _Completion(service, body, await _prompt_ids(service, body), request.state.client).response(request)

    return router


async def _prompt_ids(service: Service, body: CompletionBody) -> list[list[int]]:
    prompts = body.prompts
    service.check_answers(len(prompts), body.n)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    tokens = [prompt for prompt in prompts if not isinstance(prompt, str)]
    tokens += await service.encoded(texts, add_special_tokens=body.add_special_tokens)
    return [service.checked_prompt(prompt) for prompt in tokens]


class _Completion(Generation):
    """Prompts to continue. A choice is numbered ``prompt * n + index of the answer``."""

    id_prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, service: Service, body: CompletionBody, prompts: list[list[int]], client: str) -> None:
        scored = body.logprobs if body.echo else None
        requests = [body.request(tokens, max_tokens=body.max_tokens, logprobs=body.logprobs, prompt_logprobs=scored) for tokens in prompts]
        super().__init__(service, body, requests, client)
        self._body = body
        self._prompts = prompts
        self._places: dict[tuple[int, int], TextPlaces] = {}  # of the answers of a stream, by prompt and index

    def choices(self, answers: Sequence[Sequence[GenerateChunk]]) -> list[dict[str, Any]]:
        """Return a text for each answer to each prompt."""
        return [
            self._choice(prompt, answer, self._logprobs(prompt, of[0].get("prompt_logprobs"), answer, self._new_places(prompt)), echo=True)
            for prompt, of in enumerate(answers)
            for answer in of
        ]

    def chunk_choices(self, prompt: int, chunk: GenerateChunk) -> Iterator[dict[str, Any]]:
        """Yield one choice. The first one of an answer repeats the prompt, with ``echo``."""
        key = prompt, chunk["index"]
        is_first = key not in self._places
        if is_first:
            self._places[key] = self._new_places(prompt)
        logprobs = self._logprobs(prompt, chunk.get("prompt_logprobs"), chunk, self._places[key])
        yield self._choice(prompt, chunk, logprobs, echo=is_first)

    def _choice(self, prompt: int, chunk: GenerateChunk, logprobs: _Logprobs | None, *, echo: bool) -> dict[str, Any]:
        return {
            "index": prompt * (self._body.n or 1) + chunk["index"],
            "text": self._echoed(prompt) + chunk["text"] if echo else chunk["text"],
            "logprobs": logprobs,
            "finish_reason": chunk.get("finish_reason"),
        }

    def _echoed(self, prompt: int) -> str:
        """Return the text of a prompt with ``echo``, else nothing."""
        if not self._body.echo:
            return ""
        given = self._body.prompts[prompt]
        return given if isinstance(given, str) else self._service.tokenizer.decode(given)

    def _new_places(self, prompt: int) -> TextPlaces:
        """Return the text offsets of an answer, before its first token."""
        return TextPlaces(self._service.engine.tokenizer, context=() if self._body.echo else self._prompts[prompt])

    def _logprobs(self, prompt: int, score: PromptScore | None, chunk: GenerateChunk, places: TextPlaces) -> _Logprobs | None:
        """Return log-probabilities of the tokens of a chunk; with a score, those of the prompt come first."""
        if self._body.logprobs is None:
            return None
        found: _Logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if score is not None:
            tops: Sequence[Any] = score.top_logprobs or [None] * len(score.tokens)
            for token, value, top in zip(score.tokens, score.logprobs, tops, strict=True):
                self._add(found, token, value, dict(top or ()), places)
            places.go_to(len(self._echoed(prompt)))
        for token, value, likely in zip(chunk["token_ids"], chunk.get("log_probs", ()), chunk.get("top_logprobs", ()), strict=True):
            self._add(found, token, value, {one["token_id"]: one["logprob"] for one in likely}, places)
        return found

    def _add(self, found: _Logprobs, token: int, value: float | None, top: dict[int, float], places: TextPlaces) -> None:
        text = self._service.token_text(token)
        found["tokens"].append(text)
        found["token_logprobs"].append(value)  # None for the first token of a prompt
        found["text_offset"].append(places.of(token))
        likely = {self._service.token_text(one): logprob for one, logprob in top.items()}
        found["top_logprobs"].append(None if value is None else {**likely, text: value})
