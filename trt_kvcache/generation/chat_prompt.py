"""``ChatPrompt``: a conversation as a prompt, rendered by the chat template of a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trt_kvcache.errors import ConfigError

_SEQUENCE = (list, tuple)

#: Words in the types of parts that are no text, such as ``image_url`` and ``input_audio``.
_MEDIA = ("image", "video", "audio")


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation for a model to continue: a prompt wherever text or token ids are accepted.

    Parameters
    ----------
    messages : sequence of mapping
        ``{"role": ..., "content": ...}``, oldest first, as OpenAI's API has them. ``content`` is a text, None, or a list of parts
        ``{"type": "text", "text": ...}``, which are joined. Tool calls of the assistant (``tool_calls``) and their results are passed on to
        the template; other fields that are None are not, because many templates ask only whether a field is there.
    tools : sequence of mapping, optional
        Descriptions of the functions that the model may call, as OpenAI's API has them (JSON schema).
    template_args : mapping of str to object
        Additional variables of the template, such as ``{"enable_thinking": False}``.
    add_generation_prompt : bool
        True to end the text with the opening of the assistant's turn, False to continue the last message.

    Raises
    ------
    ConfigError
        A message has no role, or a content that is not text, such as an image.

    Examples
    --------
    >>> from trt_kvcache import ChatPrompt
    >>> prompt = ChatPrompt([{"role": "user", "content": [{"type": "text", "text": "Hello"}]}])
    >>> prompt.messages
    ({'role': 'user', 'content': 'Hello'},)
    >>> ChatPrompt([{"content": "Hello"}])
    Traceback (most recent call last):
        ...
    trt_kvcache.errors.ConfigError: messages[0]: expected a "role" such as "user", got {'content': 'Hello'}.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.messages, _SEQUENCE) or not self.messages:
            raise ConfigError(f'messages: expected a list of {{"role": ..., "content": ...}}, at least one, got {_shown(self.messages)}.')
        object.__setattr__(self, "messages", tuple(_message(f"messages[{index}]", one) for index, one in enumerate(self.messages)))
        if self.tools is not None:
            if not isinstance(self.tools, _SEQUENCE) or not all(isinstance(tool, Mapping) for tool in self.tools):
                raise ConfigError(f"tools: expected a list of JSON descriptions of functions, got {_shown(self.tools)}.")
            object.__setattr__(self, "tools", [dict(tool) for tool in self.tools] or None)
        if not isinstance(self.template_args, Mapping):
            raise ConfigError(f"template_args: expected a mapping of names to values, got {_shown(self.template_args)}.")


def _message(what: str, message: Any) -> dict[str, Any]:
    """Return a message as a template expects it."""
    if not isinstance(message, Mapping):
        raise ConfigError(f'{what}: expected {{"role": ..., "content": ...}}, got {_shown(message)}.')
    if not isinstance(message.get("role"), str):
        raise ConfigError(f'{what}: expected a "role" such as "user", got {_shown(dict(message))}.')
    copy = {name: value for name, value in message.items() if value is not None or name == "content"}
    content = copy.get("content")
    if isinstance(content, _SEQUENCE):
        copy["content"] = "".join(_part(f"{what}.content[{index}]", part) for index, part in enumerate(content))
    elif content is not None and not isinstance(content, str):
        raise ConfigError(f"{what}.content: expected a text, got {_shown(content)}.")
    if copy.get("tool_calls"):
        copy["tool_calls"] = _tool_calls(f"{what}.tool_calls", copy["tool_calls"])
    return copy


def _part(what: str, part: Any) -> str:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str) and part.get("type", "text") == "text":
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else None
    medium = next((medium for medium in _MEDIA if isinstance(kind, str) and medium in kind), None)
    if medium is not None:
        raise ConfigError(f"{what}: expected text, got a part of type {_shown(kind)}. The text decoder alone runs, without {medium} input.")
    raise ConfigError(f'{what}: expected {{"type": "text", "text": ...}}, got {_shown(part)}. Only text is supported.')


def _tool_calls(what: str, calls: Any) -> list[dict[str, Any]]:
    """Return tool calls with arguments as objects: OpenAI's API has them as JSON texts, but templates render objects."""
    if not isinstance(calls, _SEQUENCE) or not all(isinstance(call, Mapping) for call in calls):
        raise ConfigError(f"{what}: expected a list of tool calls, got {_shown(calls)}.")
    copies = [dict(call) for call in calls]
    for call in copies:
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            call["function"] = {**function, "arguments": _parsed(function["arguments"])}
    return copies


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments  # arguments that a model generated need not be JSON


def _shown(value: Any) -> str:
    """Return a shortened ``repr`` of a value for an error message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
