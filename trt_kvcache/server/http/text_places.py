"""``TextPlaces``: where in a text its tokens begin."""

from __future__ import annotations

from collections.abc import Sequence

from trt_kvcache.checkpoint import StreamDecoder, Tokenizer


class TextPlaces:
    """Says of the tokens of a text, one after another, at which character each begins: a special token takes none."""

    def __init__(self, tokenizer: Tokenizer | None, *, context: Sequence[int] = ()) -> None:
        self._decoder = None if tokenizer is None else StreamDecoder(tokenizer, context)
        self._place = 0

    def of(self, token: int) -> int:
        """Return where the next token begins: one that ends a character begins where the character does."""
        place = self._place
        if self._decoder is not None:
            self._place += len(self._decoder.push(token))
        return place

    def go_to(self, place: int) -> None:
        """Let the next token begin at a place."""
        self._place = place
