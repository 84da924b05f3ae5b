"""Formats of tool calls: detection of the format of a model, and a parser for each.

Sources: the chat templates of Qwen 2.5 and 3 (whose format is that of Hermes), Qwen3-Coder, Llama 3.1 to 3.3, and Mistral.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Protocol

#: Names of the parsers, as in vLLM.
ToolParserName = Literal["hermes", "llama3_json", "mistral"]

#: Texts in a chat template that identify a format; the first match counts.
_MARKERS: tuple[tuple[str, ToolParserName], ...] = (
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3_json"),
    ('{"name": function name, "parameters":', "llama3_json"),
)

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_CALLS, _ARGS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_PYTHON = "<|python_tag|>"

#: Most characters between the tag and the arguments of a call.
_LONGEST_HEAD = 400

_SIGN = re.compile(r"\S")
_JSON_SIGN = re.compile(r'["{}\[\]]')
_STRING_SIGN = re.compile(r'["\\]')
_NAME_BEFORE_OBJECT = re.compile(r"\s*([^\s\[\]{}\"<>]{1,256})(?:\[CALL_ID\][^\s\[\]{}]{0,64})?(?:\[ARGS\])?\s*\Z")


@dataclass(frozen=True)
class ToolCall:
    """A tool call of a model. ``arguments`` is a JSON object."""

    name: str
    arguments: str


class MalformedCallError(Exception):
    """A text begins like a tool call and is none."""


#: JSON schemas of parameters, by tool and parameter.
ParameterTypes = Mapping[str, Mapping[str, Any]]


class Reader(Protocol):
    """Parses the text after one tag."""

    def read(self, text: str, *, ended: bool) -> tuple[int, list[ToolCall]] | None:
        """Return the length of the calls and the calls; None if they are incomplete. Each text continues the previous one."""


class _Json:
    """Finds the end of a JSON object or array in a growing text, without reading any character twice."""

    def __init__(self, start: int) -> None:
        self.start = self._at = start
        self._depth, self._in_string = 0, False
        self._end: int | None = None

    def end(self, text: str) -> int | None:
        """Return the index after the end; None if the text does not have it yet."""
        if self._end is not None:
            return self._end
        while (sign := (_STRING_SIGN if self._in_string else _JSON_SIGN).search(text, self._at)) is not None:
            if sign[0] == "\\":
                if sign.end() == len(text):
                    self._at = sign.start()
                    return None
                self._at = sign.end() + 1
                continue
            self._at = sign.end()
            if sign[0] == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if sign[0] in "{[" else -1
                if self._depth <= 0:
                    self._end = self._at
                    return self._end
        self._at = len(text)
        return None


class _Hermes:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, or in it ``<function=NAME><parameter=KEY>VALUE</parameter>...``."""

    def __init__(self, types: ParameterTypes) -> None:
        self._types = types
        self._json: _Json | None = None
        self._seen = 0

    def read(self, text: str, *, ended: bool) -> tuple[int, list[ToolCall]] | None:
        start = _first_non_space(text, 0)
        if start == len(text):
            return None
        if text[start] == "{":
            return self._object(text, start, ended=ended)
        if not text.startswith("<function="[: len(text) - start], start):
            raise MalformedCallError
        end = text.find(_CLOSE, max(start, self._seen - len(_CLOSE)))
        self._seen = len(text)
        return None if end < 0 else (end + len(_CLOSE), [_call_in_tags(text[start:end].strip(), self._types)])

    def _object(self, text: str, start: int, *, ended: bool) -> tuple[int, list[ToolCall]] | None:
        self._json = self._json or _Json(start)
        end = self._json.end(text)
        if end is None:
            return None
        closing = _first_non_space(text, end)
        if text.startswith(_CLOSE, closing):
            return closing + len(_CLOSE), [_call(_parsed(text[start:end]))]
        rest = text[closing:]
        if not ended and rest != _OPEN and (_CLOSE.startswith(rest) or _OPEN.startswith(rest)):  # which tag it is decides
            return None
        if not rest or rest.startswith(_OPEN) or _CLOSE.startswith(rest):
            return len(text) if ended else end, [_call(_parsed(text[start:end]))]
        raise MalformedCallError


class _Llama:
    """``{"name": ..., "parameters": {...}}``."""

    def __init__(self) -> None:
        self._json: _Json | None = None

    def read(self, text: str, *, ended: bool) -> tuple[int, list[ToolCall]] | None:
        del ended
        start = _first_non_space(text, 0)
        if start == len(text):
            return None
        if text[start] != "{":
            raise MalformedCallError
        self._json = self._json or _Json(start)
        end = self._json.end(text)
        return None if end is None else (end, [_call(_parsed(text[start:end]), needs_arguments=True)])


class _Mistral:
    """``[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]``, or ``[TOOL_CALLS]NAME[ARGS]{...}``."""

    def __init__(self) -> None:
        self._json: _Json | None = None

    def read(self, text: str, *, ended: bool) -> tuple[int, list[ToolCall]] | None:
        del ended
        start = _first_non_space(text, 0)
        if start == len(text):
            return None
        if self._json is None:
            if text[start] != "[":
                start = text.find("{")
                if start < 0 and len(text) <= _LONGEST_HEAD:
                    return None
            if start < 0 or start > _LONGEST_HEAD:
                raise MalformedCallError
            self._json = _Json(start)
        head, end = text[: self._json.start], self._json.end(text)
        name = _NAME_BEFORE_OBJECT.match(head)
        if name is None and head.strip():
            raise MalformedCallError
        if end is None:
            return None
        value = _parsed(text[self._json.start : end])
        if name is not None:
            return end, [_call({"name": name[1], "arguments": value})]
        if not isinstance(value, list) or not value:
            raise MalformedCallError
        return end, [_call(one) for one in value]


def _first_non_space(text: str, start: int) -> int:
    """Return the index of the first character that is no white space."""
    sign = _SIGN.search(text, start)
    return len(text) if sign is None else sign.start()


def _no_constant(_: str) -> NoReturn:
    raise ValueError


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise MalformedCallError from None


def _call(value: Any, *, needs_arguments: bool = False) -> ToolCall:
    """Return the call in a JSON object."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise MalformedCallError
    given: Any = next((value[key] for key in ("arguments", "parameters") if key in value), None if needs_arguments else {})
    arguments = _parsed(given) if isinstance(given, str) else given
    if not isinstance(arguments, dict) or not _is_text(value["name"]):
        raise MalformedCallError
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)  # 1e999 parses as infinity
        return ToolCall(value["name"], written if _is_text(written) else json.dumps(arguments))
    except (ValueError, RecursionError):
        raise MalformedCallError from None


def _is_text(text: str) -> bool:
    """Tell whether UTF-8 can encode the text: JSON can contain lone surrogates."""
    return text.encode("utf-8", "ignore").decode() == text


def _call_in_tags(text: str, types: ParameterTypes) -> ToolCall:
    """Return the call in tags. A parameter with a string type is a text; another one is JSON, if it parses."""
    name, _, body = text.removeprefix("<function=").partition(">")
    if not text.startswith("<function=") or not body.rstrip().endswith("</function>"):
        raise MalformedCallError
    before, *parts = body.rstrip().removesuffix("</function>").split("<parameter=")
    if before.strip():
        raise MalformedCallError
    arguments: dict[str, Any] = {}
    for part in parts:
        key, _, rest = part.partition(">")
        value, closing, after = rest.rpartition("</parameter>")
        if not closing or after.strip():
            raise MalformedCallError
        value = value.removeprefix("\n").removesuffix("\n")
        schema = types.get(name.strip(), {}).get(key.strip())
        if not (isinstance(schema, Mapping) and schema.get("type") == "string"):
            with suppress(ValueError, RecursionError):  # a text
                value = json.loads(value, parse_constant=_no_constant)
        arguments[key.strip()] = value
    return _call({"name": name.strip(), "arguments": arguments})


@dataclass(frozen=True)
class ToolFormat:
    """Format of the tool calls of a model."""

    name: ToolParserName
    opening: str  # tag in front of a call
    tags: tuple[str, ...]  # all tags; some may be special tokens
    bare: bool = False  # an answer may begin with a call without a tag
    names_before_arguments: bool = False  # the newer of the two formats of Mistral

    def reader(self, types: ParameterTypes) -> Reader:
        """Return a parser for the text after a tag."""
        return _Hermes(types) if self.name == "hermes" else _Llama() if self.name == "llama3_json" else _Mistral()


def tool_format(name: ToolParserName | None, template: str) -> ToolFormat | None:
    """Return the format with a name, or else the one that a chat template uses; None if it is unknown."""
    name = name or next((name for marker, name in _MARKERS if marker in template), None)
    if name == "hermes":
        return ToolFormat(name, _OPEN, (_OPEN, _CLOSE))
    if name == "llama3_json":
        return ToolFormat(name, _PYTHON, (_PYTHON,), bare=True)
    if name == "mistral":
        return ToolFormat(name, _CALLS, (_CALLS, _ARGS, _CALL_ID), names_before_arguments=_ARGS in template)
    return None
