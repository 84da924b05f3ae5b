"""``Request``: one prompt being continued. Chooses its tokens, makes its text, and knows when it ends."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from trt_kvcache.checkpoint import StreamDecoder, Tokenizer
from trt_kvcache.errors import ConfigError
from trt_kvcache.generation.sampling import Sampler, SamplingParams
from trt_kvcache.generation.stop_text import StopText

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class GeneratedToken:
    """One token of one request, as it is generated.

    Parameters
    ----------
    index
        Which prompt, from 0.
    text
        What has become certain with this token: whole characters, no part of a stop text. Empty without a tokenizer.
    finish_reason : {"stop", "length"} or None
        Set with the last token: a stop token or stop text, or ``max_new_tokens`` or the cache is reached.
    """

    index: int
    token: int
    text: str
    finish_reason: FinishReason | None


class Request:
    """One prompt and what is generated after it.

    Raises ConfigError: stop texts without a tokenizer.

    Parameters
    ----------
    index
        Which prompt.
    prompt : sequence of int
        Context of the text that follows.
    tokenizer
        Without one, there is no text.
    eos_token_ids : collection of int
        The model's own end tokens.
    """

    def __init__(
        self, index: int, prompt: Sequence[int], params: SamplingParams, *, tokenizer: Tokenizer | None, eos_token_ids: Collection[int]
    ) -> None:
        if params.stop and tokenizer is None:
            raise ConfigError("stop texts: expected a model folder with tokenizer.json, got none. Use stop_token_ids.")
        self.index = index
        #: Tokens generated so far, the stop token included.
        self.tokens: list[int] = []
        #: Why it ended, or None while it goes on.
        self.finish_reason: FinishReason | None = None
        self._params = params
        self._sampler = Sampler(params)
        self._decoder = None if tokenizer is None else StreamDecoder(tokenizer, prompt)
        self._stop_text = StopText(params.stop)
        self._stop_tokens = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_token_ids))

    @property
    def sampler(self) -> tuple[int, int]:
        """Seed and counter of its sampler."""
        return self._sampler.seed, self._sampler.counter

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None

    def choose(self, logits: np.ndarray[Any, Any], *, full: bool) -> GeneratedToken:
        """Choose the next token.

        Parameters
        ----------
        logits : ndarray (vocab,) float32
        full
            The slot holds ``max_sequence_length`` tokens, so no token can follow this one.
        """
        return self._take(self._sampler.choose(logits), full)

    def replay(self, tokens: Sequence[int]) -> str:
        """Take tokens that were chosen before, by a sampler whose counter is given now, and return their text."""
        return "".join(self._take(token, False).text for token in tokens)

    def _take(self, token: int, full: bool) -> GeneratedToken:
        self.tokens.append(token)
        text = ""
        if token in self._stop_tokens:
            self.finish_reason = "stop"
        elif full or len(self.tokens) >= self._params.max_new_tokens:
            self.finish_reason = "length"
        if self._decoder is not None:
            if self.finish_reason != "stop":
                text = self._stop_text.push(self._decoder.push(token))
            if self.finished:
                text += self._stop_text.push(self._decoder.flush()) + self._stop_text.flush()
            if self._stop_text.stopped:
                self.finish_reason = "stop"
        return GeneratedToken(self.index, token, text, self.finish_reason)
