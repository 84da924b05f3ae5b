"""Bodies of requests. Unknown fields and values of another type are errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from trt_kvcache.server.http.accepted import AcceptedFields, Body, at_most

#: Most alternatives per token that a request can ask for.
MAX_TOP_LOGPROBS = 20

#: Most messages of a conversation, tools, template variables, and token ids to detokenize (more if a slot holds more).
MAX_MESSAGES, MAX_TOOLS, MAX_VARIABLES, MAX_DETOKENIZED = 4096, 512, 64, 65536

_Finite = Annotated[float, Field(allow_inf_nan=False)]
_TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_TokenIds = Annotated[list[_TokenId], Field(min_length=1, fail_fast=True)]
_Stop = Annotated[str, Field(min_length=1, max_length=1000)]

#: A ``top_p`` that keeps only the most likely token, as 0 does in OpenAI's API.
_LEAST_TOP_P = 2.0**-20


def _in_a_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


def _checked_content(content: Any) -> Any:
    if content is None or isinstance(content, str) or (isinstance(content, list) and all(isinstance(part, dict) for part in content)):
        return content
    raise ValueError("expected a text, or a list of parts")


def _prompt_tag(prompt: Any) -> str | None:
    """Return the tag of a prompt in the union of four types, by its first element."""
    if isinstance(prompt, str):
        return "=text"
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    forms = {str: "=texts", int: "=tokens", list: "=lists of tokens"}
    return next((name for kind, name in forms.items() if isinstance(first, kind)), None)


_Prompt = Annotated[
    Annotated[str, Tag("=text")]
    | Annotated[list[str], Field(fail_fast=True), Tag("=texts")]
    | Annotated[_TokenIds, Tag("=tokens")]
    | Annotated[list[_TokenIds], Field(fail_fast=True), Tag("=lists of tokens")],
    Discriminator(
        _prompt_tag,
        custom_error_type="prompt_form",
        custom_error_message="expected a text, texts, token ids or lists of token ids, at least one",
    ),
]


class StreamOptions(Body):
    """Options of a stream. ``include_obfuscation`` is accepted; events are never padded."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(Body):
    """A schema with a name."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    """Format of the text of an answer. ``grammar`` (Lark) and ``regex`` are not part of OpenAI's API."""

    type: Literal["text", "json_object", "json_schema", "grammar", "regex"]
    json_schema: JsonSchema | None = None
    grammar: Annotated[str, Field(min_length=1)] | None = None
    regex: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _fields_match_type(self) -> ResponseFormat:
        needed = {"json_schema": self.json_schema, "grammar": self.grammar, "regex": self.regex}
        for name, value in needed.items():
            if (value is not None) != (self.type == name):
                raise ValueError(f"expected {name} with the type {name!r}, and with no other one")
        return self

    @property
    def guided(self) -> dict[str, Any] | None:
        """The ``guided_decoding`` of a request to the engine."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return {"json_object": True}
        if self.json_schema is not None:
            return {"json": self.json_schema.schema_}
        return {self.type: self.grammar or self.regex}


class Sampling(Body):
    """Fields of completions and chats. The second group is not part of OpenAI's API."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    temperature: Annotated[_Finite, Field(ge=0, le=100)] | None = None
    top_p: Annotated[_Finite, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[Annotated[list[_Stop], Field(max_length=16, fail_fast=True)] | None, BeforeValidator(_in_a_list)] = None
    presence_penalty: Annotated[_Finite, Field(ge=-100, le=100)] | None = None
    frequency_penalty: Annotated[_Finite, Field(ge=-100, le=100)] | None = None
    logit_bias: Annotated[dict[str, Annotated[_Finite, Field(ge=-100, le=100)]] | None, at_most(1024)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[_Finite, Field(ge=0, lt=1)] | None = None
    repetition_penalty: Annotated[_Finite, Field(gt=0, le=100)] | None = None
    stop_token_ids: Annotated[list[_TokenId], Field(max_length=1024, fail_fast=True)] | None = None
    ignore_eos: bool | None = None

    @model_validator(mode="after")
    def _fields_fit_each_other(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: expected stream to be true")
        for key in self.logit_bias or ():
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise ValueError(f"logit_bias: expected token ids as keys, got {key[:20]!r}")
        return self

    def request(
        self, token_ids: list[int], *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None = None
    ) -> dict[str, Any]:
        """Return the request to the engine for one prompt."""
        guided = None if self.response_format is None else self.response_format.guided
        names = ("n", "temperature", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
        others = {
            "top_p": None if self.top_p is None else max(self.top_p, _LEAST_TOP_P),
            "seed": None if self.seed is None else self.seed % 2**63,
            "guided_decoding": guided,
        }
        return {
            "token_ids": token_ids,
            "sampling_options": {name: getattr(self, name) for name in names} | others,
            "stop_conditions": {
                "max_tokens": max_tokens,
                "stop": self.stop,
                "stop_token_ids": self.stop_token_ids,
                "ignore_eos": self.ignore_eos,
            },
            "output_options": {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs},
        }


class CompletionBody(Sampling):
    """Body of ``/v1/completions``."""

    prompt: _Prompt
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = 16
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: int | None = None
    suffix: Literal[None] = None
    user: str | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _completion_fields_fit(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of: expected the value of n; choosing the best of more answers is not supported")
        if self.echo and self.logprobs is not None and self.stream and (self.n or 1) > 1:
            raise ValueError("echo: expected no stream of several answers with logprobs of the prompt")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: expected at least 1, or echo with 0")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class Message(Body):
    """A message of a conversation. Further fields are for the chat template. Only messages of the assistant may have no content."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str | list[dict[str, Any]] | None, BeforeValidator(_checked_content)] = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"expected a content of the role {self.role!r:.80}, got none")
        return self


_Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class NamedFunction(Body):
    """Name of a tool."""

    name: Annotated[str, Field(min_length=1, max_length=256)]


class NamedTool(Body):
    """The tool to call."""

    type: Literal["function"]
    function: NamedFunction


class ChatBody(Sampling, AcceptedFields):
    """Body of ``/v1/chat/completions``."""

    messages: _Messages
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, at_most(MAX_VARIABLES)] = None
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _chat_fields_fit(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: expected logprobs to be true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens: expected max_completion_tokens only, or the same value")
        if self.must_call and not self.tools:
            raise ValueError("tool_choice: expected tools of which one can be called")
        if self.must_call and self.response_format is not None and self.response_format.guided is not None:
            raise ValueError("response_format: expected none of an answer that must call a tool")
        return self

    @property
    def must_call(self) -> bool:
        """True if the answer must be a tool call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def template_args(self) -> dict[str, Any]:
        """Additional variables of the chat template."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **(self.chat_template_kwargs or {})}


class TokenizeBody(Body):
    """Body of ``/tokenize``: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    messages: _Messages | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, at_most(MAX_VARIABLES)] = None
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("expected prompt or messages")
        return self


class DetokenizeBody(Body):
    """Body of ``/detokenize``."""

    model: str | None = None
    tokens: Annotated[list[_TokenId], Field(fail_fast=True)]
