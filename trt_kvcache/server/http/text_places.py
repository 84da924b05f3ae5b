"""``TextPlaces``: where in a text its tokens begin."""

from __future__ import annotations

from collections.abc import Sequence

from trt_kvcache.checkpoint import StreamDecoder, Tokenizer


class TextPlaces:
    """Says of the tokens of a text, one after another, at which character each begins: a special token takes none.

    Parameters
    ----------
    tokenizer : Tokenizer or None
        Without one there is no text.
    context : sequence of int
        Tokens in front of the text.

    Examples
    --------
    >>> from trt_kvcache import Tokenizer
    >>> from trt_kvcache.server.http.text_places import TextPlaces
    >>> tokenizer = Tokenizer.open("examples/tiny-llama")
    >>> places = TextPlaces(tokenizer)
    >>> [(tokenizer.decode([token]), places.of(token)) for token in tokenizer.encode("Alice was")]
    [('', 0), ('A', 0), ('lice', 1), (' was', 5)]
    """

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
