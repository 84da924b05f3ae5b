"""``/tokenize`` and ``/detokenize``: texts or conversations to token ids, and back."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from trt_kvcache.server.http.bodies import DetokenizeBody, TokenizeBody
from trt_kvcache.server.http.connection import unless_disconnected
from trt_kvcache.server.http.service import Service
from trt_kvcache.server.http.written import as_json


def token_routes(service: Service) -> APIRouter:
    """Return a router with both routes."""
    router = APIRouter(route_class=service.bodies.route())

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody, request: Request) -> Response:
        service.adapter_of(body.model)
        if body.messages is not None:
            conversation = service.conversation(
                body.messages,
                body.tools,
                body.chat_template_kwargs,
                add_generation_prompt=body.add_generation_prompt,
                client=request.state.client,
            )
            tokens = await unless_disconnected(request, conversation)
        else:
            [tokens] = await service.encoded([body.prompt or ""], add_special_tokens=body.add_special_tokens)
        document = {"tokens": tokens, "count": len(tokens), "max_model_len": service.engine.config.context_length}
        return Response(await service.off_loop(len(tokens), lambda: as_json(document)), media_type="application/json")

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        service.adapter_of(body.model)
        return {"prompt": await service.decoded(body.tokens)}

    return router
