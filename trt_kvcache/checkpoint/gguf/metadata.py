"""Typed access to the metadata of a GGUF file. Errors name the file, the key, the expected and the actual value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.checkpoint.gguf.header import GGUFHeader, StoredBlocks, Texts
from trt_kvcache.errors import CheckpointError


class Metadata:
    """Metadata of a model: of its first file, with the tensors of all its files."""

    def __init__(self, header: GGUFHeader, tensors: Mapping[str, StoredBlocks]) -> None:
        self.header = header
        self.tensors = tensors
        self.architecture = self.text("general.architecture")

    def __contains__(self, key: str) -> bool:
        """Return True if there is a field of this full key: see :meth:`own`."""
        return key in self.header.fields

    def own(self, name: str) -> str:
        """Return the full key of a field of the architecture: ``<architecture>.<name>``."""
        return f"{self.architecture}.{name}"

    def refusal(self, key: str, expected: str) -> CheckpointError:
        """Return the error for a field with an unsupported value, for the caller to raise."""
        value = self.header.fields.get(key)
        if isinstance(value, bytes):
            value = value.decode("utf-8", "replace")
        found = f"{len(value)} elements" if isinstance(value, Texts | np.ndarray) else short_repr(value)
        return CheckpointError(f"{self.header.path}: {key}: expected {expected}, got {found}.")

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text."""
        value = self.header.fields.get(key, default)
        if isinstance(value, bytes):
            try:
                return value.decode()
            except UnicodeDecodeError:
                raise self.refusal(key, "a text in UTF-8") from None
        if not isinstance(value, str):
            raise self.refusal(key, "a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return a flag."""
        value = self.header.fields.get(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, "true or false")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer, 0 or more."""
        value = self.header.fields.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.refusal(key, "an integer of at least 0")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number: of a float32 the shortest decimal that rounds to it, as a config.json has it."""
        value = self.header.fields.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.refusal(key, "a finite number")
        return float(str(np.float32(value))) if isinstance(value, float) and float(np.float32(value)) == value else float(value)

    def integers(self, key: str, count: int, default: int | None = None) -> list[int]:
        """Return an integer for each layer; a single stored one counts for all."""
        value = self.header.fields.get(key, default)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and len(value) == count:
            return [int(item) for item in value]
        if isinstance(value, np.ndarray):
            raise self.refusal(key, f"an integer, or {count} of them")
        return [self.integer(key, default)] * count

    def largest(self, key: str) -> int:
        """Return the largest value of a field over the layers, or 0."""
        value = self.header.fields.get(key, 0)
        return self.integer(key, 0) if not isinstance(value, np.ndarray) else max(self.integers(key, len(value)), default=0)

    def numbers(self, key: str) -> Sequence[Any]:
        """Return an array of numbers."""
        value = self.header.fields.get(key)
        if not isinstance(value, np.ndarray):
            raise self.refusal(key, "an array of numbers")
        found: list[Any] = value.tolist()
        return found

    def count_of_texts(self, key: str) -> int:
        """Return the number of texts in an array."""
        value = self.header.fields.get(key)
        if not isinstance(value, Texts):
            raise self.refusal(key, "an array of texts")
        return len(value)

    def texts(self, key: str) -> list[str]:
        """Return an array of texts."""
        value = self.header.fields.get(key)
        if not isinstance(value, Texts):
            raise self.refusal(key, "an array of texts")
        try:
            return [text.decode() for text in value]
        except UnicodeDecodeError:
            raise self.refusal(key, "texts in UTF-8") from None
