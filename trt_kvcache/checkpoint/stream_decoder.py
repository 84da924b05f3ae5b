"""Text of a growing sequence of tokens, handed out only when no later token can change it."""

from __future__ import annotations

from collections.abc import Sequence

from trt_kvcache.checkpoint.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"

# Tokens of a context that can change how the next one is decoded; and how many may be held back.
_NEIGHBOURS = 8

# Tokens that a character of four bytes can be split over, but for its last.
_LONGEST_CHARACTER = 3


class StreamDecoder:
    """Turns tokens into text one at a time, whole characters only.

    A character of several bytes may be split over tokens; while its bytes are not complete, decoding ends in U+FFFD and the
    text is held back.

    The text between two positions is the difference of two decodings that begin at one earlier token, because what a
    token decodes to depends on its neighbours. The window moves on with the tokens, so a step costs the same at any length.

    ``context``: sequence of int. Tokens before the stream (a prompt). They are not handed out, but tokenizers that drop the space in front
    of a text need them to keep the space in front of the first new word.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = list(context[-_NEIGHBOURS:])
        self._told = len(self._window)

    def push(self, token_id: int) -> str:
        """Add one token and return the text that has become certain, often empty while a character is incomplete."""
        self._window.append(token_id)
        before, text = self._decode()
        held = len(self._window) - self._told
        if len(text) > len(before) and not text.endswith(_REPLACEMENT):
            return self._tell(text[len(before) :], held)
        if held <= _NEIGHBOURS:
            return ""
        # So many tokens without a whole character are none (special tokens, bytes that are no text): only the last can begin one.
        certain = held - _LONGEST_CHARACTER
        return self._tell(self._tokenizer.decode(self._window[: self._told + certain])[len(before) :], certain)

    def _tell(self, text: str, tokens: int) -> str:
        """Hand out the next tokens: they are the neighbours of what follows. Tokens without text are forgotten instead."""
        if text:
            del self._window[: self._told]
            self._told = tokens
        else:
            del self._window[self._told : self._told + tokens]
        return text

    def flush(self) -> str:
        """End the stream and return what was held back; bytes that never became a character are U+FFFD."""
        before, text = self._decode()
        self._window, self._told = [], 0
        return text[len(before) :]

    def copy(self) -> StreamDecoder:
        """Return a decoder in the same state, which continues on its own."""
        other = StreamDecoder(self._tokenizer)
        other._window, other._told = list(self._window), self._told
        return other

    def _decode(self) -> tuple[str, str]:
        return self._tokenizer.decode(self._window[: self._told]), self._tokenizer.decode(self._window)
