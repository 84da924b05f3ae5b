"""Bytes of single tokens: a token that is only a part of a character has bytes, but no text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

#: The space in pieces of SentencePiece.
_SPACE = "\u2581"


def _alphabet() -> dict[str, int]:
    """Return the character that byte-level tokenizers write for each byte: itself if it is printable, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


class TokenBytes:
    """Converts the pieces of a vocabulary to bytes: of byte-level BPE, or of SentencePiece with or without byte fallback."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()
        kinds = set(_kinds(json.loads(backend.decoder.__getstate__()))) if backend.decoder is not None else set()
        self._alphabet = _alphabet() if "ByteLevel" in kinds else None
        self._is_sentencepiece = bool(kinds & {"ByteFallback", "Metaspace"})

    def of(self, token: int) -> bytes | None:
        """Return the bytes of a token; None for an unknown id, or for pieces of another kind of tokenizer."""
        if token in self._added:
            return str(self._added[token].content).encode()
        piece = self._backend.id_to_token(token)
        if piece is None:
            return None
        if self._alphabet is not None:
            found = [self._alphabet.get(character) for character in piece]
            return None if None in found else bytes(byte for byte in found if byte is not None)
        if not self._is_sentencepiece:
            return None
        byte = _BYTE.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.replace(_SPACE, " ").encode()


def _kinds(decoder: Mapping[str, Any]) -> list[str]:
    """Return the types of a decoder and of its parts."""
    return [decoder["type"], *(kind for part in decoder.get("decoders", ()) for kind in _kinds(part))]
