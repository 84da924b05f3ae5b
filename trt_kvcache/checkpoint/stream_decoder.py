"""Text of a growing sequence of tokens, released as soon as no later token can change it: ``TokenDecoder`` and ``StreamDecoder``."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

from trt_kvcache.checkpoint.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"

# Number of earlier tokens that can change the text of the next one; also the limit of tokens that are held back.
_NEIGHBOURS = 8

# A character of four bytes has at most this many tokens before its last one.
_LONGEST_CHARACTER = 3


class DecoderState(NamedTuple):
    """Position of a :class:`TokenDecoder` in a sequence: a value, never changed in place."""

    #: The last tokens: first those whose text was released and is context, then the held ones.
    window: tuple[int, ...]
    #: Number of tokens of the window whose text was released.
    released: int


class TokenDecoder:
    """The rules of :class:`StreamDecoder` as functions from one state to the next."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def begin(self, context: Sequence[int] = ()) -> DecoderState:
        """Return the state after ``context``, whose text is not part of the stream."""
        window = tuple(context[-_NEIGHBOURS:])
        # Byte fallback decodes a run of bytes as a whole: one that begins inside a character would be wrong to its end.
        window = window[self._continued(window) :]
        return DecoderState(window, len(window) - self._unfinished(window))

    def push(self, state: DecoderState, token: int) -> tuple[str, DecoderState]:
        """Return the text that ``token`` releases, and the state after it."""
        state = state._replace(window=(*state.window, token))
        held = len(state.window) - state.released
        text = self._text_of_held(state, held)
        if text and not text.endswith(_REPLACEMENT):
            return text, _released(state, text, held)
        if held <= _NEIGHBOURS:
            return "", state
        # This many tokens without a whole character are not text (special tokens, invalid bytes): only the last ones can begin a character.
        certain = held - _LONGEST_CHARACTER
        text = self._text_of_held(state, certain)
        return text, _released(state, text, certain)

    def finish(self, state: DecoderState) -> str:
        """Return the text that is held; the beginning of a character at the end becomes a single U+FFFD."""
        unfinished = self._unfinished(state.window[state.released :])
        return self._text_of_held(state, len(state.window) - state.released - unfinished) + _REPLACEMENT * bool(unfinished)

    def _text_of_held(self, state: DecoderState, tokens: int) -> str:
        """Return the text of the first ``tokens`` held tokens: shaped by their neighbours, without changes to released text."""
        window, released = list(state.window), state.released
        end = released + tokens
        before, text = self._tokenizer.decode(window[:released]), self._tokenizer.decode(window[:end])
        # Byte fallback replaces a run of bytes as a whole if one of them is wrong: also those that were a character before.
        return text[len(before) :] if text.startswith(before) else self._tokenizer.decode(window[released:end])

    def _unfinished(self, tokens: Sequence[int]) -> int:
        """Return the number of tokens at the end that are single bytes and together begin a character."""
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
        """Return the number of tokens at the start that are single bytes and continue a character."""
        pieces = [self._tokenizer.token_bytes(token) for token in tokens[:_LONGEST_CHARACTER]]
        return next(
            (count for count, piece in enumerate(pieces) if piece is None or len(piece) != 1 or piece[0] & 0xC0 != 0x80), len(pieces)
        )


def _released(state: DecoderState, text: str, tokens: int) -> DecoderState:
    """Return the state after the text of the first held tokens was released: context of the next ones. Without text they are dropped."""
    window, released = state
    if text:
        return DecoderState(window[released:], tokens)
    return DecoderState(window[:released] + window[released + tokens :], released)


class StreamDecoder:
    """Decodes tokens one at a time and returns whole characters only.

    The bytes of one character may be spread over several tokens. While they are incomplete, the decoded text ends in U+FFFD and is
    held back. Text that was returned is never changed, although ``decode`` of all tokens may change it: with byte fallback it replaces
    a run of bytes as a whole if one of them is wrong.

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
    The text of a token depends on its neighbours. So the text between two positions is the difference of two decodings that begin
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
        self._decoder = TokenDecoder(tokenizer)
        self._state = self._decoder.begin(context)

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
        text, self._state = self._decoder.push(self._state, token_id)
        return text

    def flush(self) -> str:
        """End the stream.

        Returns
        -------
        str
            The text that was held back. Bytes that are not a whole character become U+FFFD, and the beginning of one at the end becomes a
            single U+FFFD.
        """
        text, self._state = self._decoder.finish(self._state), DecoderState((), 0)
        return text

    def copy(self) -> StreamDecoder:
        """Return a decoder in the same state that continues independently.

        Returns
        -------
        StreamDecoder
            Tokens added to one do not affect the other.
        """
        return copy.copy(self)  # its state is a value
