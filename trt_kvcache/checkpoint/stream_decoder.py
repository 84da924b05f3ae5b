"""``StreamDecoder``: the text of a growing sequence of tokens, returned as soon as no later token can change it."""

from __future__ import annotations

from collections.abc import Sequence

from trt_kvcache.checkpoint.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"

# How many earlier tokens can change what the next one decodes to. Also the most tokens that are held back.
_NEIGHBOURS = 8

# A character of four bytes has at most this many tokens before its last one.
_LONGEST_CHARACTER = 3


class StreamDecoder:
    """Decodes tokens one at a time and returns whole characters only.

    The bytes of one character may be spread over several tokens. While they are incomplete, the decoded text ends in U+FFFD and is
    held back. Text that was returned is never changed, where ``decode`` of all tokens may change it: with byte fallback it replaces a
    run of bytes as a whole if one of them is wrong.

    Parameters
    ----------
    tokenizer : Tokenizer
        The tokenizer of the model.
    context : sequence of int
        Tokens before the stream, such as the prompt. Their text is not returned, except for a character that begins in them and is
        completed by the stream. Some tokenizers drop the space at the start of a text and need the context to keep the space before
        the first new word.

    Notes
    -----
    What a token decodes to depends on its neighbours. So the text between two positions is the difference of two decodings that begin
    at the same earlier token. That token moves forward with the stream, so a step costs the same at any length.

    Examples
    --------
    >>> from trt_kvcache import Tokenizer
    >>> from trt_kvcache.checkpoint import StreamDecoder
    >>> tokenizer = Tokenizer.open("examples/tiny-llama")
    >>> prompt, continuation = tokenizer.encode("The"), tokenizer.encode(" white rabbit", add_special_tokens=False)
    >>> decoder = StreamDecoder(tokenizer, context=prompt)
    >>> "".join(decoder.push(token) for token in continuation) + decoder.flush()
    ' white rabbit'
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = list(context[-_NEIGHBOURS:])
        # Byte fallback decodes a run of bytes as a whole: one that begins inside a character would be wrong to its end.
        del self._window[: self._continued(self._window)]
        self._released = len(self._window) - self._unfinished(self._window)

    def push(self, token_id: int) -> str:
        """Add one token.

        Parameters
        ----------
        token_id : int
            The next token of the stream.

        Returns
        -------
        str
            The text that no later token can change and that was not returned before. Often empty while a character is incomplete.
        """
        self._window.append(token_id)
        held = len(self._window) - self._released
        text = self._text_of_held(held)
        if text and not text.endswith(_REPLACEMENT):
            return self._release(text, held)
        if held <= _NEIGHBOURS:
            return ""
        # So many tokens without a whole character are not text (special tokens, invalid bytes): only the last ones can begin a character.
        certain = held - _LONGEST_CHARACTER
        return self._release(self._text_of_held(certain), certain)

    def _release(self, text: str, tokens: int) -> str:
        """Return ``text`` and make its tokens the context of those that follow. Tokens without text are dropped from the window."""
        if text:
            del self._window[: self._released]
            self._released = tokens
        else:
            del self._window[self._released : self._released + tokens]
        return text

    def flush(self) -> str:
        """End the stream.

        Returns
        -------
        str
            The text that was held back. Bytes that are not a whole character become U+FFFD, and the beginning of one at the end becomes a
            single U+FFFD.
        """
        unfinished = self._unfinished(self._window[self._released :])
        text = self._text_of_held(len(self._window) - self._released - unfinished) + _REPLACEMENT * bool(unfinished)
        self._window, self._released = [], 0
        return text

    def copy(self) -> StreamDecoder:
        """Return a decoder in the same state that continues independently.

        Returns
        -------
        StreamDecoder
            Tokens added to one do not affect the other.
        """
        other = StreamDecoder(self._tokenizer)
        other._window, other._released = list(self._window), self._released
        return other

    def _text_of_held(self, tokens: int) -> str:
        """Return the text of the first held tokens, as their neighbours shape it but without what they make of earlier text."""
        end = self._released + tokens
        before, text = self._tokenizer.decode(self._window[: self._released]), self._tokenizer.decode(self._window[:end])
        # Byte fallback replaces a run of bytes as a whole if one of them is wrong: also those that were a character before.
        return text[len(before) :] if text.startswith(before) else self._tokenizer.decode(self._window[self._released : end])

    def _unfinished(self, tokens: Sequence[int]) -> int:
        """Return how many tokens at the end are single bytes, and together the beginning of a character."""
        for count in range(1, min(_LONGEST_CHARACTER, len(tokens)) + 1):
            pieces = [self._tokenizer.token_bytes(token) for token in tokens[-count:]]
            if any(piece is None or len(piece) != 1 for piece in pieces):
                return 0
            try:
                b"".join(piece for piece in pieces if piece is not None).decode()
            except UnicodeDecodeError as error:
                if error.start == 0 and error.reason == "unexpected end of data":
                    return count
        return 0

    def _continued(self, tokens: Sequence[int]) -> int:
        """Return how many tokens at the start are single bytes that continue a character."""
        pieces = [self._tokenizer.token_bytes(token) for token in tokens[:_LONGEST_CHARACTER]]
        return next(
            (count for count, piece in enumerate(pieces) if piece is None or len(piece) != 1 or piece[0] & 0xC0 != 0x80), len(pieces)
        )
