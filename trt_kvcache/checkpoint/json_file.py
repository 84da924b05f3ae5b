"""Read text and JSON files of a model folder, with errors that name the file."""

import json
from pathlib import Path
from typing import Any

from trt_kvcache.errors import CheckpointError


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file.

    Parameters
    ----------
    path : Path
        The file.

    Returns
    -------
    str
        Its text.

    Raises
    ------
    CheckpointError
        The file is missing or cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: expected a file, got nothing there. A Hugging Face model folder has one.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}.") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Parameters
    ----------
    path : Path
        The file.

    Returns
    -------
    dict
        The parsed object.

    Raises
    ------
    CheckpointError
        The file is missing, cannot be read, is not JSON, or holds a JSON value other than an object.
    """
    try:
        value = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path}: expected JSON, got a syntax error: {error}. The file may be truncated.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}.")
    return value


def read_json_if_present(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file that may be missing.

    Parameters
    ----------
    path : Path
        The file.

    Returns
    -------
    dict
        The parsed object; empty if there is no such file.

    Raises
    ------
    CheckpointError
        The file cannot be read, is not JSON, or holds a JSON value other than an object.
    """
    return read_json(path) if path.is_file() else {}
