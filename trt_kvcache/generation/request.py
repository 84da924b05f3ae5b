"""``Request``: one prompt that is being continued. It chooses tokens, turns them into text, and knows when it ends."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from trt_kvcache.checkpoint import StreamDecoder, Tokenizer
from trt_kvcache.errors import ConfigError, ProcessorError
from trt_kvcache.generation.device_sampler import DeviceSampler, SampledToken
from trt_kvcache.generation.logits_edits import LogitsEdits
from trt_kvcache.generation.sampling import Sampler, SamplerPosition, SamplingParams
from trt_kvcache.generation.stop_text import StopText
from trt_kvcache.generation.token_logprobs import TokenLogprobs, token_logprobs

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
    logprob : float or None
        With ``SamplingParams.logprobs``: the natural logarithm of the token's probability in the softmax of the model's own logits, before
        bias, penalties, logits processors and temperature, as OpenAI and vLLM report it.
    top_logprobs : tuple of (int, float), or None
        With ``SamplingParams.logprobs``: the most likely tokens and their log-probabilities, the most likely one first; of equally likely
        ones the lowest id first. The chosen token need not be among them.

    Examples
    --------
    >>> from trt_kvcache import InferenceSession
    >>> with InferenceSession.from_model("examples/tiny-llama", engine="numpy") as session:
    ...     *_, last = session.generate([5, 6, 7], max_new_tokens=3, ignore_eos=True)
    >>> last.index, last.finish_reason
    (0, 'length')

    In an interactive session, only what is set is shown:

    >>> from trt_kvcache import GeneratedToken
    >>> GeneratedToken(0, 12, " cat", None)
    GeneratedToken(index=0, token=12, text=' cat')
    """

    index: int
    token: int
    text: str
    finish_reason: FinishReason | None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] | None = None

    def __repr__(self) -> str:
        shown = [f"index={self.index}", f"token={self.token}", f"text={self.text!r}"]
        shown += [] if self.finish_reason is None else [f"finish_reason={self.finish_reason!r}"]
        shown += [] if self.logprob is None else [f"logprob={self.logprob:.4f}"]
        shown += [f"top_logprobs=<{len(self.top_logprobs)}>"] if self.top_logprobs else []
        return f"GeneratedToken({', '.join(shown)})"


#: Logits from which a token is to be chosen, and whether the slot was full.
_KeptLogits = tuple[np.ndarray[Any, Any], bool]

#: What a :class:`Request` needs to return to an earlier state: number of tokens, reason to finish, counter of the sampler, for a request
#: with text decoder and stop texts, and the logits that it keeps.
RequestSavepoint = tuple[int, FinishReason | None, int, tuple[StreamDecoder, StopText] | None, _KeptLogits | None]


class Request:
    """One prompt and what is generated after it."""

    def __init__(
        self,
        index: int,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        tokenizer: Tokenizer | None,
        eos_token_ids: Collection[int],
        generated: int = 0,
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
        self._generated = generated
        self._sampler = Sampler(params)
        self._edits = LogitsEdits(params, self.prompt, generated=generated)
        self._kept: _KeptLogits | None = None
        self._decoder = None if tokenizer is None else StreamDecoder(tokenizer, prompt)
        self._stop_text = StopText(params.stop)
        special = [] if tokenizer is None else [tokenizer.special_token_id(text) for text in params.stop]
        named = frozenset(params.stop_token_ids) | frozenset(token for token in special if token is not None)
        self._stop_tokens = named | (frozenset() if params.ignore_eos else frozenset(eos_token_ids))

    @property
    def sampler(self) -> SamplerPosition:
        """Seed and counter of its sampler."""
        sampler = self._sampler
        return sampler.seed, sampler.counter

    @property
    def sampled(self) -> bool:
        """Whether random numbers choose its tokens: whether it is not greedy."""
        return self._params.temperature != 0

    @property
    def has_text(self) -> bool:
        """Whether its tokens are turned into text."""
        return self._decoder is not None

    @property
    def generated(self) -> int:
        """Tokens generated so far, those of an earlier part of the request included."""
        return self._generated + len(self.tokens)

    @property
    def remaining(self) -> int:
        """How many more tokens ``max_new_tokens`` allows."""
        return self._params.max_new_tokens - len(self.tokens)

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None

    def follow(self, held: Sequence[int]) -> None:
        """Take what its slot holds for its prompt, where penalties and logits processors ask for the tokens before the generated ones."""
        self._edits.set_prompt(held)

    def choose(self, logits: np.ndarray[Any, Any], *, full: bool) -> GeneratedToken:
        """Choose the next token."""
        token = self._choose(logits)
        logprobs = None if self._params.logprobs is None else token_logprobs(logits, token, self._params.logprobs)
        return self._take(token, logprobs, full)

    def prepare(self) -> None:
        """Have logits processors that work elsewhere begin with the next token; forget logits that were kept."""
        self._kept = None
        self._edits.ready(self.tokens)

    @property
    def waits(self) -> bool:
        """Whether it keeps logits until its logits processors are ready."""
        return self._kept is not None

    def ready(self, seconds: float = 0.0) -> bool:
        """Tell whether its logits processors are ready, or will be within some seconds."""
        return self._edits.ready(self.tokens, seconds)

    def offer(self, logits: np.ndarray[Any, Any], *, full: bool) -> GeneratedToken | None:
        """Choose the next token if that needs no waiting; if it does, keep a copy of the logits for :meth:`resume`."""
        if self._edits.ready(self.tokens):
            try:
                return self.choose(logits, full=full)
            except ProcessorError:
                if not self._edits.is_deferred:
                    raise
        self._kept = np.array(logits, np.float32), full
        return None

    def resume(self) -> GeneratedToken | None:
        """Choose the next token from the logits that were kept, if its logits processors are ready by now."""
        assert self._kept is not None
        if not self._edits.ready(self.tokens):
            return None
        logits, full = self._kept
        token = self.choose(logits, full=full)
        self._kept = None
        return token

    @property
    def fits_device(self) -> bool:
        """Whether a :class:`~trt_kvcache.generation.device_sampler.DeviceSampler` can choose its tokens."""
        return DeviceSampler.accepts(self._params)

    def enter(self, sampler: DeviceSampler, slot: int, *, stream: Any) -> None:
        """Let a sampler on the device choose the tokens after those so far."""
        seed, counter = self.sampler
        prompt, generated = self._edits.history()
        sampler.set_slot(slot, self._params, seed=seed, counter=counter, prompt=prompt, generated=generated, stream=stream)

    def take(self, sampled: SampledToken, *, full: bool) -> GeneratedToken:
        """Take the next token as the device chose it. What comes back, and what is raised, is as for :meth:`choose`."""
        if sampled.error is not None:
            raise self._named(sampled.error) if isinstance(sampled.error, ProcessorError) else sampled.error
        self._sampler.move_to(self._sampler.counter + 1)
        return self._take(sampled.token, sampled.logprobs, full)

    def _take(self, token: int, logprobs: TokenLogprobs | None, full: bool) -> GeneratedToken:
        self._edits.add(token)
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
        if not self.finished:
            self._edits.ready(self.tokens)
        if logprobs is None:
            return GeneratedToken(self.index, token, text, self.finish_reason)
        return GeneratedToken(self.index, token, text, self.finish_reason, logprobs.chosen, logprobs.top)

    def _choose(self, logits: np.ndarray[Any, Any]) -> int:
        if not self._edits.active:
            return self._sampler.choose(logits)
        try:
            edited, best = self._edits.apply(logits, self.tokens)
        except ProcessorError as error:
            raise self._named(error) from error.__cause__
        return self._sampler.choose_from(edited, best)

    def _named(self, error: ProcessorError) -> ProcessorError:
        named = ProcessorError(f"request {self.index}: {error}")
        named.request = self.index
        return named

    def savepoint(self) -> RequestSavepoint:
        """Return the state now, for one :meth:`rollback`."""
        text = None if self._decoder is None else (self._decoder.copy(), self._stop_text.copy())
        return len(self.tokens), self.finish_reason, self._sampler.counter, text, self._kept

    def rollback(self, savepoint: RequestSavepoint) -> None:
        """Return to the state at ``savepoint``. Tokens are not chosen or decoded again."""
        num_tokens, self.finish_reason, counter, text, self._kept = savepoint
        del self.tokens[num_tokens:]
        self._edits.count(self.tokens)
        self._sampler.move_to(counter)
        if text is not None:
            self._decoder, self._stop_text = text
