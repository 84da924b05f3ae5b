"""``AnswerTools``: tool calls in the answers to one chat, in the format of OpenAI's API."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterator, Sequence
from typing import Any

from trt_kvcache.checkpoint import Tokenizer
from trt_kvcache.server.generate_request import GenerateChunk
from trt_kvcache.server.http.api_errors import ApiError
from trt_kvcache.server.http.bodies import ChatBody, NamedTool
from trt_kvcache.server.http.service import Service
from trt_kvcache.server.http.text_places import TextPlaces
from trt_kvcache.server.http.tool_choice import forced_calls, parameter_types
from trt_kvcache.server.http.tool_formats import ToolCall
from trt_kvcache.server.http.tool_stream import Part, TagTexts, ToolStream

_LETTERS = string.ascii_letters + string.digits


def _token_ids(tokenizer: Tokenizer, tags: Sequence[str]) -> dict[str, int]:
    """Return the ids of tags that are one token. Special tokens are looked up, as SentencePiece puts a space in front of a text."""
    found: dict[str, int] = {}
    for tag in tags:
        special, tokens = tokenizer.special_token_id(tag), tokenizer.encode(tag, add_special_tokens=False)
        if special is not None or len(tokens) == 1:
            found[tag] = tokens[0] if special is None else special
    return found


class AnswerTools:
    """Tool options of one request."""

    def __init__(self, service: Service, body: ChatBody) -> None:
        guided = body.response_format is not None and body.response_format.guided is not None
        self._form = service.tool_format if body.tools and body.tool_choice != "none" and not guided else None
        self._tokenizer = service.engine.tokenizer
        self._only_one = body.parallel_tool_calls is False
        self._types = parameter_types(body.tools or ()) if self._form else {}
        tag_ids = {} if self._form is None else _token_ids(service.tokenizer, self._form.tags)
        self._tags = {token: tag for tag, token in tag_ids.items() if service.tokenizer.special_token_id(tag) == token}
        #: ``guided_decoding`` of an answer that must call a tool.
        self.guided: dict[str, Any] | None = None
        if not body.must_call:
            return
        if self._form is None:
            raise ApiError(
                400,
                "tool_choice: expected none or auto, as the format of tool calls is not found in the chat template of this model. "
                "Set the option --tool-call-parser of the server.",
                param="tool_choice",
            )
        name = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
        self.guided = forced_calls(self._form, body.tools or (), name=name, several=not self._only_one, tag_ids=tag_ids)

    def parser(self, prompt: Sequence[int]) -> AnswerParser:
        """Return a parser for one answer to a prompt."""
        if self._form is None:
            return AnswerParser(None, None, mistral=False)
        tags = TagTexts(TextPlaces(self._tokenizer, context=prompt), self._tags) if self._tags else None
        stream = ToolStream(self._form, self._types, only_one=self._only_one, hidden=tuple(self._tags.values()))
        return AnswerParser(stream, tags, mistral=self._form.name == "mistral")


class AnswerParser:
    """Splits one answer into content and tool calls."""

    def __init__(self, stream: ToolStream | None, tags: TagTexts | None, *, mistral: bool) -> None:
        self._stream, self._tags, self._mistral = stream, tags, mistral
        self._calls = 0

    def _parts_of(self, chunk: GenerateChunk) -> list[Part]:
        if self._stream is None:
            return [chunk["text"]]
        text = chunk["text"] if self._tags is None else self._tags.add(chunk["text"], chunk["token_ids"])
        parts = self._stream.push(text)
        return parts + self._stream.end() if "finish_reason" in chunk else parts

    def message(self, answer: GenerateChunk) -> dict[str, Any]:
        """Return content and tool calls of a whole answer."""
        parts = self._parts_of(answer)
        content = "".join(part for part in parts if isinstance(part, str))
        calls = [self._call(part) for part in parts if isinstance(part, ToolCall)]
        return {"content": content or None, "tool_calls": calls} if calls else {"content": content}

    def deltas(self, chunk: GenerateChunk) -> Iterator[dict[str, Any]]:
        """Yield the deltas of a chunk: at least one if it has tokens. The arguments of a call are one delta."""
        parts = self._parts_of(chunk)
        for part in parts:
            if isinstance(part, str):
                if part or chunk["token_ids"] or "finish_reason" not in chunk:
                    yield {"content": part}
                continue
            index, call = self._calls, self._call(part)
            begun = {**call, "function": {"name": part.name, "arguments": ""}}
            yield {"tool_calls": [{"index": index, **begun}]}
            yield {"tool_calls": [{"index": index, "function": {"arguments": part.arguments}}]}
        if not parts and chunk["token_ids"]:
            yield {"content": ""}

    def _call(self, call: ToolCall) -> dict[str, Any]:
        self._calls += 1
        # Mistral's templates accept ids of exactly nine letters and digits.
        name = "".join(secrets.choice(_LETTERS) for _ in range(9)) if self._mistral else f"call_{secrets.token_hex(12)}"
        return {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

    def finish_reason(self, last: GenerateChunk) -> str:
        """Return the finish reason of an answer, after its last chunk."""
        reason = last["finish_reason"]
        return "tool_calls" if self._calls and reason == "stop" else reason
