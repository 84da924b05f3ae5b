"""``TextPlaces``: text offsets of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from trt_kvcache.checkpoint import StreamDecoder, Tokenizer


class TextPlaces:
    """Returns the offset in characters of each token of a text, in order. A special token takes no characters."""

    # context: tokens in front of the text. Without a tokenizer all offsets are 0.

    def __init__(self, tokenizer: Tokenizer | None, *, context: Sequence[int] = ()) -> None:
        self._decoder = None if tokenizer is None else StreamDecoder(tokenizer, context)
        self._place = 0

    def of(self, token: int) -> int:
        """Return the offset of the next token. A token with the last bytes of a character begins at that character."""
        place = self._place
        if self._decoder is not None:
            self._place += len(self._decoder.push(token))
        return place

    def go_to(self, place: int) -> None:
        """Set the offset of the next token."""
        self._place = place
