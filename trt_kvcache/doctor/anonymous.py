"""Texts of a report without paths of files, and without the names of the user and the machine."""

from __future__ import annotations

import getpass
import os
import platform
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_HOME = re.compile(r"(/home/|/Users/|[A-Za-z]:\\Users\\)[^/\\\s'\"]+")
_URL_OR_PATH = re.compile(
    r"(?P<url>https?://\S+)|(?P<path>(?<![\w./\\])(?:~?/|[A-Za-z]:\\|~\\)(?:[^\s'\"`:;,()\[\]<>|/\\]+[/\\])+)(?P<name>[^\s'\"`:;,()\[\]<>|/\\]*)"
)


class Anonymizer:
    """Replaces, in all texts of a JSON document, paths by the last part of their name. ``folders`` are replaced by their words."""

    def __init__(self, folders: Sequence[tuple[str | os.PathLike[str], str]] = ()) -> None:
        own: list[tuple[str | os.PathLike[str], str]] = [
            (Path(__file__).parents[2], "PACKAGE"),
            (sys.prefix, "PYTHON"),
            (tempfile.gettempdir(), "TMP"),
            (Path.home(), "~"),
        ]
        texts = [(os.fspath(folder), word) for folder, word in (*folders, *own)]
        real = [(os.path.realpath(folder), word) for folder, word in texts]
        # The longest first: one may be in another.
        self._folders = sorted({*texts, *real} - {("/", "~")}, key=lambda pair: -len(pair[0]))
        names = [_user_name(), platform.node()]
        self._names = [re.compile(rf"(?<!\w){re.escape(name)}(?!\w)") for name in names if len(name) > 1]

    def clean(self, value: Any) -> Any:
        """Return a JSON value with clean texts; keys stay."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, dict):
            return {key: self.clean(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.clean(item) for item in value]
        return value

    def _text(self, text: str) -> str:
        for folder, word in self._folders:
            text = text.replace(folder, word)
        text = _HOME.sub("~", text)
        text = _URL_OR_PATH.sub(lambda found: found["url"] or f".../{found['name']}", text)
        for name in self._names:
            text = name.sub("NAME", text)
        return text


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # no such user in the system, or no module pwd
        return ""
