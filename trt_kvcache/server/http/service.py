"""``Service``: what all routes need: the engine, what is allowed, and prompts as token ids."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from trt_kvcache.checkpoint import Tokenizer
from trt_kvcache.errors import ConfigError
from trt_kvcache.generation.chat_prompt import ChatPrompt
from trt_kvcache.server.engine import Engine
from trt_kvcache.server.http.bodies import Message
from trt_kvcache.server.http.errors import ApiError
from trt_kvcache.server.http.options import ServerOptions
from trt_kvcache.server.http.rendering import Rendering

#: Characters of a text that are encoded in the event loop; longer ones in another thread.
_SHORT = 2000


@dataclass(frozen=True)
class Service:
    """One engine behind HTTP.

    Parameters
    ----------
    engine : Engine
        Started before the first request.
    options : ServerOptions
        What is allowed.
    created : int
        When it was made, in seconds since 1970.
    """

    engine: Engine
    options: ServerOptions
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model(self) -> str:
        """The name of the model."""
        return self.engine.config.model

    def check_model(self, name: str | None) -> None:
        """Check that a request is for this model; without a name it is."""
        if name is not None and name != self.model:
            raise ApiError(404, f"model: expected {self.model!r}, got {name!r:.80}.", param="model", code="model_not_found")

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        if self.engine.tokenizer is None:
            raise ConfigError("text: expected a model folder with tokenizer.json, got none. Send token ids.")
        return self.engine.tokenizer

    async def encoded(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text; a long one does not hold others up."""
        if len(text) <= _SHORT:
            return self.tokenizer.encode(text, add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens)

    async def conversation(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        template_args: dict[str, Any] | None,
        *,
        add_generation_prompt: bool = True,
        client: str,
    ) -> list[int]:
        """Return the token ids of a conversation of a client, as the chat template of the model writes it."""
        tokenizer = self.tokenizer
        if not tokenizer.has_chat_template:
            raise ConfigError("messages: expected a model with a chat template, got one without. Use /v1/completions.")
        prompt = ChatPrompt([one.model_dump(exclude_unset=True) for one in messages], tools, template_args or {})
        render = partial(
            tokenizer.apply_chat_template, prompt.messages, add_generation_prompt, tools=prompt.tools, template_args=prompt.template_args
        )
        text = await self._rendering.run(client, render)
        return await self.encoded(text, add_special_tokens=False)

    @cached_property
    def _rendering(self) -> Rendering:
        return Rendering(self.engine.config.max_queue)

    def close(self) -> None:
        """Render no conversation any more: those that are being rendered, and later ones, are refused. Idempotent."""
        self._rendering.close()
        if self.engine.tokenizer is not None:
            self.engine.tokenizer.close_chat_template()

    def checked(self, token_ids: list[int]) -> list[int]:
        """Return a prompt that is not too long and has tokens of the model."""
        config = self.engine.config
        most = min(self.options.max_prompt_tokens or config.context_length, config.context_length)
        if len(token_ids) > most:
            raise ApiError(
                400,
                f"prompt: expected at most {most} tokens, got {len(token_ids)}.",
                param="prompt",
                code="context_length_exceeded",
            )
        if not token_ids:
            raise ApiError(400, "prompt: expected at least one token, got none.", param="prompt")
        wrong = next((token for token in token_ids if token >= config.vocab_size), None)
        if wrong is not None:
            raise ApiError(400, f"prompt: expected token ids from 0 to {config.vocab_size - 1}, got {wrong}.", param="prompt")
        return token_ids

    def token_bytes(self, token: int) -> bytes | None:
        """Return the bytes of one token, if they are known."""
        if self.engine.tokenizer is None:
            return None
        found = self.engine.tokenizer.token_bytes(token)
        if found is None:
            text = self.engine.tokenizer.decode([token], skip_special_tokens=False)
            found = None if "\ufffd" in text else text.encode()
        return found or None

    def token_text(self, token: int) -> str:
        """Return the text of one token for people and programs that compare them; bytes of a part of a character have none."""
        found = self.token_bytes(token)
        try:
            return f"token_id:{token}" if found is None else found.decode()
        except UnicodeDecodeError:
            return f"token_id:{token}"


def as_event(document: dict[str, Any]) -> bytes:
    """Return a document as a server-sent event."""
    return b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n\n"


#: The last event of a stream.
DONE = b"data: [DONE]\n\n"
