"""``Request``: one prompt that is being continued. It chooses tokens, turns them into text, and knows when it ends."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from trt_kvcache.checkpoint import StreamDecoder, Tokenizer
from trt_kvcache.errors import ConfigError
from trt_kvcache.generation.sampling import Sampler, SamplerPosition, SamplingParams
from trt_kvcache.generation.stop_text import StopText

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class GeneratedToken:
    """One token of one request, as it is generated.

    Parameters
    ----------
    index : int
        Which prompt, from 0.
    token : int
        Token id.
    text : str
        The text that has become certain with this token: whole characters, and nothing that could be part of a stop text. Empty without
        a tokenizer.
    finish_reason : {"stop", "length"} or None
        Set with the last token of a request. ``"stop"``: a stop token or stop text. ``"length"``: ``max_new_tokens`` is reached, or
        the slot is full.

    Examples
    --------
    >>> from trt_kvcache import InferenceSession
    >>> with InferenceSession.from_model("examples/tiny-llama", engine="reference") as session:
    ...     *_, last = session.generate([5, 6, 7], max_new_tokens=3, ignore_eos=True)
    >>> last.index, last.finish_reason
    (0, 'length')
    """

    index: int
    token: int
    text: str
    finish_reason: FinishReason | None


#: What a :class:`Request` needs to return to an earlier state: number of tokens, reason to finish, counter of the sampler, and for a
#: request with text, decoder and stop texts.
RequestSavepoint = tuple[int, FinishReason | None, int, tuple[StreamDecoder, StopText] | None]


class Request:
    """One prompt and what is generated after it.

    Parameters
    ----------
    index : int
        Which prompt, from 0: what its tokens are labelled with.
    prompt : sequence of int
        Token ids; the context of the text that follows.
    params : SamplingParams
        How tokens are chosen, and when the request ends.
    tokenizer : Tokenizer or None
        Without one, there is no text.
    eos_token_ids : collection of int
        The model's own end tokens.

    Raises
    ------
    ConfigError
        Stop texts without a tokenizer.
    """

    def __init__(
        self, index: int, prompt: Sequence[int], params: SamplingParams, *, tokenizer: Tokenizer | None, eos_token_ids: Collection[int]
    ) -> None:
        if params.stop and tokenizer is None:
            raise ConfigError("stop texts: expected a model folder with tokenizer.json, got none. Use stop_token_ids.")
        #: Which prompt, from 0.
        self.index = index
        #: Token ids of the prompt.
        self.prompt = tuple(prompt)
        #: Tokens generated so far, including the stop token.
        self.tokens: list[int] = []
        #: Why it ended, or None while it continues.
        self.finish_reason: FinishReason | None = None
        self._params = params
        self._sampler = Sampler(params)
        self._decoder = None if tokenizer is None else StreamDecoder(tokenizer, prompt)
        self._stop_text = StopText(params.stop)
        self._stop_tokens = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_token_ids))

    @property
    def sampler(self) -> SamplerPosition:
        """Seed and counter of its sampler."""
        sampler = self._sampler
        return sampler.seed, sampler.counter

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None

    def choose(self, logits: np.ndarray[Any, Any], *, full: bool) -> GeneratedToken:
        """Choose the next token.

        Parameters
        ----------
        logits : ndarray (vocab,) float32
            On the host. Not changed.
        full : bool
            Whether the slot already holds ``max_sequence_length`` tokens, so that no token can follow this one.

        Returns
        -------
        GeneratedToken
            The token, the text that has become certain with it, and the reason to finish if it is the last one. The request has taken it.

        Raises
        ------
        EngineError
            A logit is NaN, or no logit is finite. The request is unchanged.
        """
        token = self._sampler.choose(logits)
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

    def savepoint(self) -> RequestSavepoint:
        """Return the state now, for one :meth:`rollback`."""
        text = None if self._decoder is None else (self._decoder.copy(), self._stop_text.copy())
        return len(self.tokens), self.finish_reason, self._sampler.counter, text

    def rollback(self, savepoint: RequestSavepoint) -> None:
        """Return to the state at ``savepoint``. Tokens are not chosen or decoded again.

        Parameters
        ----------
        savepoint : tuple
            Of this request. It can be used once.
        """
        num_tokens, self.finish_reason, counter, text = savepoint
        del self.tokens[num_tokens:]
        self._sampler.move_to(counter)
        if text is not None:
            self._decoder, self._stop_text = text
