"""``Service``: the engine, the options and the tokenizer, for all routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any, TypeVar

from trt_kvcache._util.freed_memory import return_freed_memory
from trt_kvcache.checkpoint import Tokenizer
from trt_kvcache.errors import ConfigError
from trt_kvcache.generation.chat_prompt import ChatPrompt
from trt_kvcache.server.engine_client import EngineClient
from trt_kvcache.server.http.api_errors import ApiError
from trt_kvcache.server.http.bodies import MAX_DETOKENIZED, Message
from trt_kvcache.server.http.json_bodies import BodyReader
from trt_kvcache.server.http.rendering import Rendering
from trt_kvcache.server.http.server_options import ServerOptions
from trt_kvcache.server.http.tool_formats import ToolFormat, tool_format

_T = TypeVar("_T")

#: Most characters or tokens of a request, or log-probabilities of an answer, that are processed in the event loop; more go to a thread.
_SHORT = 2000

#: A message costs as much time as this number of characters.
_MESSAGE = 50

#: Size above which freed memory is returned to the system, once the answer is sent.
_LARGE = 100_000

#: Tokens whose bytes and text are cached.
_REMEMBERED = 1 << 16

#: Most JSON values of a body apart from token ids, and most token ids.
_OTHER_VALUES, _MOST_TOKENS = 1 << 16, 1 << 20

#: Most characters that Unicode normalization composes into one.
_NORMALIZED = 4


@dataclass(frozen=True)
class Service:
    """One engine that is served by HTTP. It is started before the first request."""

    engine: EngineClient
    options: ServerOptions
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model(self) -> str:
        """The name of the model."""
        return self.engine.config.model

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the model and of its adapters, each of which is a model for clients."""
        return self.model, *self.engine.config.adapters

    def adapter_of(self, name: str | None) -> str | None:
        """Return the adapter that a request names as its model; None for the model itself. Raises an error for another name."""
        if name is None or name == self.model:
            return None
        if name not in self.models:
            expected = ", ".join(map(repr, self.models))
            raise ApiError(404, f"model: expected {expected}, got {name!r:.80}.", param="model", code="model_not_found")
        return name

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        if self.engine.tokenizer is None:
            raise ConfigError("text: expected a model folder with tokenizer.json, got none. Send token ids.")
        return self.engine.tokenizer

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """Format in which the model writes tool calls, if it is known."""
        return tool_format(self.options.tool_call_parser, self.tokenizer.chat_template or "")

    @cached_property
    def bodies(self) -> BodyReader:
        """Reader of the bodies of requests."""

        def max_values() -> int:
            config = self.engine.config
            return _OTHER_VALUES + min(self.max_answers * config.context_length, _MOST_TOKENS)

        return BodyReader(max_values)

    @property
    def max_answers(self) -> int:
        """Most answers that can run or wait at once."""
        return self.engine.config.max_num_seqs + self.engine.config.max_queue

    def check_answers(self, prompts: int, choices: int | None) -> None:
        """Raise an error if the engine can never hold this number of answers at once."""
        wanted = prompts * (choices or 1)
        if wanted > self.max_answers:
            field = "n" if prompts == 1 else "prompt"
            raise ApiError(400, f"{field}: expected at most {self.max_answers} answers at once, got {wanted}.", param=field)

    @property
    def max_tokens(self) -> int:
        """Most tokens of a prompt."""
        most = self.engine.config.context_length
        return min(self.options.max_prompt_tokens or most, most)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(2, thread_name_prefix="trt_kvcache texts")

    def prepare(self) -> None:
        """Compute slow properties of the tokenizer in advance, after the start of the engine."""
        if self.engine.tokenizer is not None:
            _ = self.engine.tokenizer.longest_token

    async def off_loop(self, size: int, work: Callable[[], _T]) -> _T:
        """Call a function, in a thread if its work is large, so that the event loop is not blocked."""
        if size <= _SHORT:
            return work()
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, work)
        finally:
            if size > _LARGE:
                loop.call_later(1.0, self._threads.submit, return_freed_memory)

    async def encoded(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of texts. A text with too many characters for the longest prompt is refused before it is encoded."""
        if not texts:  # a model may have no tokenizer
            return []
        tokenizer, size = self.tokenizer, sum(map(len, texts))
        if size <= _SHORT:
            return [tokenizer.encode(text, add_special_tokens) for text in texts]
        # An upper bound, except for texts that a tokenizer shortens, such as white space that it drops: they are refused too.
        most = self.max_tokens * tokenizer.longest_token * _NORMALIZED
        for text in texts:
            if len(text) > most:
                raise ApiError(
                    400,
                    f"prompt: expected at most {self.max_tokens} tokens, of at most {most} characters, got {len(text)} characters.",
                    param="prompt",
                    code="context_length_exceeded",
                )
        return await self.off_loop(size, lambda: tokenizer.encode_all(texts, add_special_tokens))

    async def conversation(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        template_args: dict[str, Any] | None,
        *,
        add_generation_prompt: bool = True,
        client: str,
    ) -> list[int]:
        """Render a conversation with the chat template of the model, and return its token ids."""
        tokenizer = self.tokenizer
        if not tokenizer.has_chat_template:
            raise ConfigError("messages: expected a model with a chat template, got one without. Use /v1/completions.")
        prompt = await self.off_loop(
            _MESSAGE * len(messages),
            lambda: ChatPrompt([one.model_dump(exclude_unset=True) for one in messages], tools, template_args or {}),
        )
        render = partial(
            tokenizer.apply_chat_template, prompt.messages, add_generation_prompt, tools=prompt.tools, template_args=prompt.template_args
        )
        text = await self._rendering.run(client, render)
        [tokens] = await self.encoded([text], add_special_tokens=False)
        return tokens

    async def decoded(self, token_ids: list[int]) -> str:
        """Return the text of token ids, including special tokens."""
        tokenizer = self.tokenizer
        most = max(MAX_DETOKENIZED, self.engine.config.context_length)
        if len(token_ids) > most:
            raise ApiError(400, f"tokens: expected at most {most}, got {len(token_ids)}.", param="tokens")
        return await self.off_loop(len(token_ids), lambda: tokenizer.decode(token_ids, skip_special_tokens=False))

    @cached_property
    def _rendering(self) -> Rendering:
        return Rendering(self.engine.config.max_queue)

    def close(self) -> None:
        """Refuse conversations that are being rendered, and later ones. Idempotent."""
        self._rendering.close()
        if self.engine.tokenizer is not None:
            self.engine.tokenizer.close_chat_template()

    def checked_prompt(self, token_ids: list[int]) -> list[int]:
        """Return a prompt after checking its length and token ids."""
        most = self.max_tokens
        if len(token_ids) > most:
            raise ApiError(
                400,
                f"prompt: expected at most {most} tokens, got {len(token_ids)}.",
                param="prompt",
                code="context_length_exceeded",
            )
        if not token_ids:
            raise ApiError(400, "prompt: expected at least one token, got none.", param="prompt")
        vocab_size = self.engine.config.vocab_size
        wrong = next((token for token in token_ids if token >= vocab_size), None)
        if wrong is not None:
            raise ApiError(400, f"prompt: expected token ids from 0 to {vocab_size - 1}, got {wrong}.", param="prompt")
        return token_ids

    @cached_property
    def _known_tokens(self) -> Callable[[int], tuple[bytes | None, str]]:
        return lru_cache(_REMEMBERED)(self._token)

    def _token(self, token: int) -> tuple[bytes | None, str]:
        """Return bytes and text of a token."""
        found = self._token_bytes(token)
        try:
            return found, f"token_id:{token}" if found is None else found.decode()
        except UnicodeDecodeError:
            return found, f"token_id:{token}"

    def _token_bytes(self, token: int) -> bytes | None:
        if self.engine.tokenizer is None:
            return None
        found = self.engine.tokenizer.token_bytes(token)
        if found is None:
            text = self.engine.tokenizer.decode([token], skip_special_tokens=False)
            found = None if "\ufffd" in text else text.encode()
        return found or None

    def token_bytes(self, token: int) -> bytes | None:
        """Return the bytes of a token, if they are known."""
        return self._known_tokens(token)[0]

    def token_text(self, token: int) -> str:
        """Return the text of a token; ``token_id:N`` if its bytes are only a part of a character."""
        return self._known_tokens(token)[1]
