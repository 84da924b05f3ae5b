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
    held back.

    Parameters
    ----------
    tokenizer : Tokenizer
        The tokenizer of the model.
    context : sequence of int
        Tokens before the stream, such as the prompt. Their text is not returned. Some tokenizers drop the space at the start of a
        text and need the context to keep the space before the first new word.

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
        self._released = len(self._window)

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
        before, text = self._decode()
        held = len(self._window) - self._released
        if len(text) > len(before) and not text.endswith(_REPLACEMENT):
            return self._release(text[len(before) :], held)
        if held <= _NEIGHBOURS:
            return ""
        # So many tokens without a whole character are not text (special tokens, invalid bytes): only the last ones can begin a character.
        certain = held - _LONGEST_CHARACTER
        return self._release(self._tokenizer.decode(self._window[: self._released + certain])[len(before) :], certain)

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
            The text that was held back. Bytes that are not a whole character become U+FFFD.
        """
        before, text = self._decode()
        self._window, self._released = [], 0
        return text[len(before) :]

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

    def _decode(self) -> tuple[str, str]:
        return self._tokenizer.decode(self._window[: self._released]), self._tokenizer.decode(self._window)
