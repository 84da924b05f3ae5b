"""Text and JSON files of a model folder, with errors that name the file."""

from pathlib import Path
from typing import Any

from trt_kvcache._util.json_text import JSONTextError, parse_json
from trt_kvcache._util.regular_file import read_regular
from trt_kvcache.errors import CheckpointError

#: Limit of a text file in bytes: five times the largest ``tokenizer.json`` in use.
MAX_TEXT_NBYTES = 1 << 28

#: Limit of a parsed JSON file in bytes: ten times the index of a thousand shards.
MAX_JSON_NBYTES = 1 << 26


def read_text(path: Path, limit: int = MAX_TEXT_NBYTES) -> str:
    """Return the text of a regular file in UTF-8 of at most ``limit`` bytes. Raises CheckpointError."""
    try:
        return read_regular(path, limit).decode("utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: expected a file, got nothing there. A Hugging Face model folder has one.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}.") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises CheckpointError for any other content."""
    text = read_text(path, MAX_JSON_NBYTES)
    try:
        value = parse_json(text)
    except JSONTextError as error:
        hint = " The file may be truncated." if "syntax error" in str(error) else ""
        raise CheckpointError(f"{path}: {error}.{hint}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}.")
    return value


def read_json_if_present(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty one if there is no such file."""
    return read_json(path) if path.exists() else {}
