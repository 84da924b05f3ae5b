"""``TextStream``: the tokens of a request as text, in whole characters and up to the first stop text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trt_kvcache.checkpoint.stream_decoder import DecoderState, TokenDecoder
from trt_kvcache.checkpoint.tokenizer import Tokenizer
from trt_kvcache.generation.stop_matcher import StopMatcher, StopState


class TextState(NamedTuple):
    """Progress of a :class:`TextStream`: a value, never changed in place."""

    decoder: DecoderState
    stop: StopState

    @property
    def stopped(self) -> bool:
        """True once a stop text was found."""
        return self.stop.stopped


class TextStream:
    """Decodes the tokens of one request, from one state to the next."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._decoder = TokenDecoder(tokenizer)
        self._matcher = StopMatcher(stops)

    def begin(self, prompt: Sequence[int]) -> TextState:
        """Return the state after a prompt."""
        return TextState(self._decoder.begin(prompt), StopState())

    def push(self, state: TextState, token: int) -> tuple[str, TextState]:
        """Return the text that ``token`` releases, and the state after it."""
        text, decoder = self._decoder.push(state.decoder, token)
        text, stop = self._matcher.push(state.stop, text)
        return text, TextState(decoder, stop)

    def finish(self, state: TextState) -> tuple[str, TextState]:
        """Return the text that is held back at the end of the stream, and the state after it."""
        text, stop = self._matcher.push(state.stop, self._decoder.finish(state.decoder))
        return text + stop.held, TextState(DecoderState((), 0), stop._replace(held=""))
