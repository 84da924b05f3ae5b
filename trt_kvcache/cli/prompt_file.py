"""Reading files of prompts: text with one prompt per line, or JSON lines."""

import json
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from trt_kvcache._util.json_text import JSONTextError, parse_json
from trt_kvcache.errors import ConfigError
from trt_kvcache.generation.prompts import Prompt
from trt_kvcache.generation.sampling import SamplingParams

#: Fields of an answer, in addition to the metadata of its prompt.
ANSWER_FIELDS = frozenset({"index", "text", "tokens", "finish_reason", "seed", "logprobs"})

#: Sampling options that a prompt may have.
OPTION_FIELDS = frozenset(field.name for field in fields(SamplingParams)) - {"logits_processors"}


@dataclass(frozen=True)
class FilePrompt:
    """A prompt of a file."""

    place: str  # file and line, for errors
    prompt: Prompt  # empty if there are messages; the session checks it
    options: dict[str, Any] = field(default_factory=dict)  # fields of SamplingParams, not checked
    messages: list[dict[str, Any]] | None = None  # a conversation, instead of a prompt
    metadata: dict[str, Any] = field(default_factory=dict)  # all other fields, which the answer repeats


def read_prompt_file(path: Path) -> list[FilePrompt]:
    """Return the prompts of a ``.jsonl`` or text file. stdin (``-``) is JSON lines if each line begins with ``{``."""
    stdin = str(path) == "-"
    name = "stdin" if stdin else str(path)
    try:
        text = (sys.stdin.buffer.read() if stdin else path.read_bytes()).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: expected UTF-8, got byte {error.object[error.start]:#04x} at {error.start}.") from None
    lines = [
        (number, line) for number, line in enumerate(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), start=1) if line.strip()
    ]
    if not lines:
        raise ConfigError(f"{name}: expected at least one prompt, got none.")
    is_json = all(line.lstrip().startswith("{") for _, line in lines) if stdin else path.suffix == ".jsonl"
    parse = _json_prompt if is_json else FilePrompt
    return [parse(f"{name}:{number}", line) for number, line in lines]


def _json_prompt(place: str, line: str) -> FilePrompt:
    try:
        value = parse_json(line)
    except JSONTextError as error:
        raise ConfigError(f"{place}: {error}.") from None
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{place}: expected JSON in UTF-8, got an error: {error}.") from None
    if not isinstance(value, dict):
        value = {"prompt": value}
    prompt, messages = value.pop("prompt", None), value.pop("messages", None)
    if (messages is None) == (prompt is None) or not isinstance(prompt, str | list | None):
        raise ConfigError(
            f'{place}: expected a text, a list of token ids, or an object with one as "prompt" or with "messages", got {line.strip():.60}.'
        )
    if messages is not None and not _is_conversation(messages):
        raise ConfigError(f'{place}: messages: expected a list of objects with "role" and "content", oldest first, got {messages!r:.60}.')
    options = {name: value.pop(name) for name in sorted(OPTION_FIELDS & value.keys())}
    taken = sorted(ANSWER_FIELDS & value.keys())
    if taken:
        raise ConfigError(f"{place}: {', '.join(taken)}: expected another name; the answer has a field of this name.")
    return FilePrompt(place, "" if prompt is None else prompt, options, messages, value)


def _is_conversation(messages: object) -> bool:
    return isinstance(messages, list) and bool(messages) and all(isinstance(message, dict) and "role" in message for message in messages)
