"""JSON documents, encoded in pieces: one call of the encoder holds the GIL until it returns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

#: Encodes a short document in one call.
dumped = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode

#: Elements of a list per call of the encoder, and depth to which a document is encoded member by member.
_AT_ONCE, _LEVELS = 32, 4


def as_json(document: Any) -> bytes:
    """Return a document as JSON in UTF-8, without spaces. Lone surrogates become ``?``."""
    return "".join(_pieces(document, _LEVELS)).encode("utf-8", "replace")


def _pieces(value: Any, levels: int) -> Iterator[str]:
    if not value or not levels or not isinstance(value, dict | list):
        yield dumped(value)
    elif isinstance(value, dict):
        for index, (name, member) in enumerate(value.items()):
            yield f"{',' if index else '{'}{dumped(name)}:"
            yield from _pieces(member, levels - 1)
        yield "}"
    elif isinstance(value[0], dict) and len(value) <= _AT_ONCE**2:
        for index, element in enumerate(value):
            yield "," if index else "["
            yield from _pieces(element, levels - 1)
        yield "]"
    else:
        for begin in range(0, len(value), _AT_ONCE):
            yield f"{',' if begin else '['}{dumped(value[begin : begin + _AT_ONCE])[1:-1]}"
        yield "]"
