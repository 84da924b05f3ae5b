"""Files of prompts: text, one prompt a line, or JSON lines."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trt_kvcache.errors import ConfigError
from trt_kvcache.generation.prompts import Prompt


@dataclass(frozen=True)
class FilePrompt:
    """A prompt of a file.

    ``place``: File and line, for messages.
    ``prompt``: prompt. As it stands there; whether it is one is for the session to say.
    ``options``: dict. Fields of SamplingParams for this prompt alone.
    """

    place: str
    prompt: Prompt
    options: dict[str, Any] = field(default_factory=dict)


def read_prompt_file(path: Path) -> list[FilePrompt]:
    """Return the prompts of a file; lines of white space alone are skipped.

    ``path``: ``.jsonl``: each line a text, a list of token ids, or an object with one of them as ``prompt`` beside sampling options. Any
    other: each line is a prompt.

    Raises ConfigError: not UTF-8, not JSON, something else on a line, or no prompt at all. OSError.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected UTF-8, got byte {error.object[error.start]:#04x} at {error.start}.") from None
    parse = _json_prompt if path.suffix == ".jsonl" else FilePrompt
    prompts = [parse(f"{path}:{number}", line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise ConfigError(f"{path}: expected at least one prompt, got none.")
    return prompts


def _json_prompt(place: str, line: str) -> FilePrompt:
    try:
        value = json.loads(line)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: expected JSON in UTF-8, got an error: {error}.") from None
    if not isinstance(value, dict):
        value = {"prompt": value}
    if not isinstance(value.get("prompt"), str | list):
        raise ConfigError(f'{place}: expected a text, a list of token ids, or an object with one as "prompt", got {line.strip():.60}.')
    return FilePrompt(place, value.pop("prompt"), value)
