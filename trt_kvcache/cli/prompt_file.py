"""Reading files of prompts: text with one prompt per line, or JSON lines."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trt_kvcache._util.json_text import JSONTextError, parse_json
from trt_kvcache.errors import ConfigError
from trt_kvcache.generation.prompts import Prompt


@dataclass(frozen=True)
class FilePrompt:
    """A prompt of a file.

    Parameters
    ----------
    place : str
        File and line, for error messages.
    prompt : prompt
        As it is in the file; the session checks it.
    options : dict
        Fields of :class:`~trt_kvcache.generation.sampling.SamplingParams` for this prompt alone; not checked.
    """

    place: str
    prompt: Prompt
    options: dict[str, Any] = field(default_factory=dict)


def read_prompt_file(path: Path) -> list[FilePrompt]:
    """Return the prompts of a file. Lines of white space are skipped.

    Parameters
    ----------
    path : Path
        ``.jsonl``: each line is a text, a list of token ids, or an object with one of them as ``prompt`` and sampling options. Any other
        file: each line is a prompt.

    Returns
    -------
    list of FilePrompt
        At least one.

    Raises
    ------
    ConfigError
        The file is not UTF-8, a line is not JSON or not a prompt, or there is no prompt.
    OSError
        The file cannot be read.
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
        value = parse_json(line)
    except JSONTextError as error:
        raise ConfigError(f"{place}: {error}.") from None
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{place}: expected JSON in UTF-8, got an error: {error}.") from None
    if not isinstance(value, dict):
        value = {"prompt": value}
    if not isinstance(value.get("prompt"), str | list):
        raise ConfigError(f'{place}: expected a text, a list of token ids, or an object with one as "prompt", got {line.strip():.60}.')
    return FilePrompt(place, value.pop("prompt"), value)
