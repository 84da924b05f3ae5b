"""The text files of a model: of its folder, or from the metadata of its GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trt_kvcache.checkpoint.gguf.header import is_gguf
from trt_kvcache.checkpoint.gguf.model import GGUFModel
from trt_kvcache.checkpoint.json_file import read_json, read_text
from trt_kvcache.checkpoint.weight_files import gguf_path
from trt_kvcache.errors import CheckpointError

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"

#: One unit: the tokenizer files of a folder are not mixed with the metadata of a GGUF file.
_OF_TOKENIZER = (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE)


class ModelFiles:
    """The text files of a model, by name. ``place``: a model folder or a GGUF file."""

    def __init__(self, place: Path) -> None:
        if not place.exists():
            raise CheckpointError(f"{place}: expected a model folder, got nothing there.")
        if not place.is_dir() and not is_gguf(place):
            raise CheckpointError(f"{place}: expected a model folder, got a file that is no GGUF file.")
        self.place = place
        self._gguf: GGUFModel | None = None

    def source(self, name: str) -> Path:
        """Return the file of a text, for messages: the GGUF file itself for its metadata."""
        gguf = self._gguf_of(name)
        return self.place / name if gguf is None else gguf.path

    def has(self, name: str) -> bool:
        """Return True if there is a file of this name, or metadata for it."""
        gguf = self._gguf_of(name)
        if gguf is None:
            return self.place.is_dir() and (self.place / name).exists()
        return name == CONFIG_FILE or (name in _OF_TOKENIZER and gguf.has_tokenizer)

    def text(self, name: str) -> str:
        """Return the text of a file, or raise CheckpointError if there is none."""
        gguf = self._gguf_of(name)
        if gguf is not None and self.has(name):
            return gguf.tokenizer_json if name == TOKENIZER_FILE else json.dumps(self.json(name), indent=2, ensure_ascii=False) + "\n"
        return read_text(self.place / name)

    def json(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file, or raise CheckpointError if there is none."""
        gguf = self._gguf_of(name)
        if gguf is not None and name == CONFIG_FILE:
            return gguf.config
        if gguf is not None and name == TOKENIZER_CONFIG_FILE and gguf.has_tokenizer:
            return gguf.tokenizer_config
        return read_json(self.place / name)

    def json_if_present(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file, or an empty one if there is no such file."""
        return self.json(name) if self.has(name) else {}

    def _gguf_of(self, name: str) -> GGUFModel | None:
        """Return the GGUF file whose metadata replaces a file; None if the file exists, or nothing replaces it."""
        if name != CONFIG_FILE and name not in _OF_TOKENIZER:
            return None
        if self.place.is_dir():
            first = TOKENIZER_FILE if name in _OF_TOKENIZER else name
            if (self.place / first).exists() or (self.place / name).exists():
                return None
        if self._gguf is None:
            path = gguf_path(self.place)
            self._gguf = None if path is None else GGUFModel(path)
        return self._gguf
