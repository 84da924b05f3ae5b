"""``Request``: the generation for one prompt: choice of tokens, text, and end conditions."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from trt_kvcache.checkpoint import Tokenizer
from trt_kvcache.errors import ConfigError, KVCacheError, ProcessorError
from trt_kvcache.generation.device_sampler import DeviceSampler, Positions, SampledToken, sampling_row
from trt_kvcache.generation.draft_tree import DraftTree
from trt_kvcache.generation.drafting import Drafting
from trt_kvcache.generation.logits_edits import LogitsEdits
from trt_kvcache.generation.sampling import Sampler, SamplerPosition, SamplingParams
from trt_kvcache.generation.text_stream import TextState, TextStream
from trt_kvcache.generation.token_logprobs import TokenLogprobs, token_logprobs

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class GeneratedToken:
    """One token of one request, as it is generated.

    Parameters
    ----------
    index : int
        Number of the prompt, from 0.
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

    The ``repr`` shows fields that are set:

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


class KeptLogits(NamedTuple):
    """A copy of the logits of a token that waits for logits processors."""

    logits: np.ndarray[Any, Any]
    #: The slot was full.
    full: bool


class RequestProgress(NamedTuple):
    """Progress of a :class:`Request`: a value, never changed in place."""

    num_tokens: int
    finish_reason: FinishReason | None
    #: None without a tokenizer.
    text: TextState | None
    kept: KeptLogits | None = None


class Choice(NamedTuple):
    """The next token of a request, and the progress with it."""

    #: None if the request keeps the logits instead.
    token: GeneratedToken | None
    progress: RequestProgress


class VerifiedDraft(NamedTuple):
    """The choices of a step that verified a draft, in order, and the rows of the step after which they were made."""

    choices: list[Choice]
    path: list[int]


class Request:
    """One prompt and its generated tokens.

    ``generated``: number of tokens at the end of ``prompt`` that an earlier part of the request generated. Raises ConfigError.
    """

    def __init__(
        self,
        index: int,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        tokenizer: Tokenizer | None,
        eos_token_ids: Collection[int],
        generated: int = 0,
        drafting: Drafting | None = None,
        adapter: str | None = None,
    ) -> None:
        if params.stop and tokenizer is None:
            raise ConfigError("stop texts: expected a model folder with tokenizer.json, got none. Use stop_token_ids.")
        #: Number of the prompt, from 0: the label of its tokens.
        self.index = index
        #: Token ids of the prompt.
        self.prompt = tuple(prompt)
        #: Its drafts; None without speculative decoding.
        self.drafting = drafting
        #: Name of the adapter that runs it; None for the base model.
        self.adapter = adapter
        self._params = params
        self._generated = generated
        # Tokens past `progress.num_tokens` do not count.
        self._tokens: list[int] = []
        self._sampler = Sampler(params)
        self._row: Any = None  # for its positions on the device
        self._edits = LogitsEdits(params, self.prompt, generated=generated)
        self._text = None if tokenizer is None else TextStream(tokenizer, params.stop)
        #: Progress so far. To go back to it, keep it and call :meth:`restore`.
        self.progress = RequestProgress(0, None, None if self._text is None else self._text.begin(prompt))
        special = [] if tokenizer is None else [tokenizer.special_token_id(text) for text in params.stop]
        named = frozenset(params.stop_token_ids) | frozenset(token for token in special if token is not None)
        self._stop_tokens = named | (frozenset() if params.ignore_eos else frozenset(eos_token_ids))

    @property
    def tokens(self) -> list[int]:
        """Tokens generated so far, including the stop token: a copy."""
        return self._tokens[: self.progress.num_tokens]

    @property
    def num_tokens(self) -> int:
        """Number of tokens generated so far."""
        return self.progress.num_tokens

    @property
    def last_token(self) -> int:
        """The token that was generated last."""
        return self._tokens[self.progress.num_tokens - 1]

    @property
    def finish_reason(self) -> FinishReason | None:
        """Reason of its end; None while it continues."""
        return self.progress.finish_reason

    @property
    def sampler(self) -> SamplerPosition:
        """Seed and counter of its sampler."""
        return self._sampler.seed, self._params.counter + self.progress.num_tokens

    @property
    def sampled(self) -> bool:
        """True if random numbers choose its tokens: it is not greedy."""
        return self._params.temperature != 0

    @property
    def has_text(self) -> bool:
        """True if its tokens are decoded to text."""
        return self._text is not None

    @property
    def generated(self) -> int:
        """Number of tokens generated so far, including the tokens of an earlier part of the request."""
        return self._generated + self.progress.num_tokens

    @property
    def remaining(self) -> int:
        """Number of further tokens that ``max_new_tokens`` allows."""
        return self._params.max_new_tokens - self.progress.num_tokens

    @property
    def finished(self) -> bool:
        """True once it has ended."""
        return self.progress.finish_reason is not None

    def set_context(self, held: Sequence[int]) -> None:
        """Take the tokens of its slot as its prompt, for penalties and logits processors."""
        self._edits.set_prompt(held)

    # --- choosing: may raise, and changes nothing that a later choice depends on ---

    def choose(self, logits: np.ndarray[Any, Any], *, full: bool) -> Choice:
        """Choose the next token from logits float32 ``(vocab,)`` on the host. ``full``: the slot has no room for another token."""
        token = self._choose_token(logits)
        logprobs = None if self._params.logprobs is None else token_logprobs(logits, token, self._params.logprobs)
        return self._with_token(token, logprobs, full)

    def choose_or_keep(self, logits: np.ndarray[Any, Any], *, full: bool) -> Choice:
        """Choose the next token if no logits processor has to be waited for; if one has, keep a copy of the logits for :meth:`resume`."""
        if self._edits.ready(self._taken()):
            try:
                return self.choose(logits, full=full)
            except ProcessorError:
                if not self._edits.is_deferred:
                    raise  # a deferred one raises again in resume()
        return Choice(None, self.progress._replace(kept=KeptLogits(np.array(logits, np.float32), full)))

    def resume(self) -> Choice | None:
        """Choose the next token from the logits that were kept; None while its logits processors are not ready."""
        assert self.progress.kept is not None
        return self.choose(self.progress.kept.logits, full=self.progress.kept.full) if self._edits.ready(self._taken()) else None

    def choose_verified(self, logits: np.ndarray[Any, Any], draft: DraftTree, *, room: int, waits: bool) -> VerifiedDraft:
        """Choose the token before a draft of n tokens, and each later one for as long as the draft has the chosen tokens.

        ``logits``: float32 ``(n + 1, vocab)``. ``room``: tokens of the draft that the slot can hold. ``waits``: for logits processors.
        """
        choose = self.choose if waits else self.choose_or_keep
        return self._verified(draft, lambda row, depth: choose(logits[row], full=depth >= room))

    def receive_verified(self, sampled: Sequence[SampledToken], draft: DraftTree, *, room: int) -> VerifiedDraft:
        """Return the choices of the device at the positions of a draft, as :meth:`choose_verified` would."""
        return self._verified(draft, lambda row, depth: self.receive(sampled[row], full=depth >= room))

    def _verified(self, draft: DraftTree, choose: Callable[[int, int], Choice]) -> VerifiedDraft:
        """Choose after row 0, the token before the draft, then after the row of each chosen token in turn, which is its index plus 1."""
        before, found, path = self.progress, list[Choice](), [0]
        try:
            while True:
                try:
                    choice = choose(path[-1], len(found))
                except KVCacheError:
                    if not found:
                        raise
                    break  # raised again by the next step: the tokens before the error are not lost
                found.append(choice)
                if choice.token is None or choice.token.finish_reason is not None:
                    break
                index = draft.child(path[-1] - 1, choice.token.token)
                if index is None:
                    break
                self.take(choice)
                path.append(index + 1)
        finally:
            if self.progress is not before:
                self.restore(before)
        return VerifiedDraft(found, path[: len(found)])

    def guess(self, logits: np.ndarray[Any, Any], count: int) -> int:
        """Choose a token from a draft model's logits, as they are, with the random number of the position ``count`` tokens ahead."""
        return self._sampler.choose(logits, self.sampler[1] + count)

    def receive(self, sampled: SampledToken, *, full: bool) -> Choice:
        """Return the choice of the device, as :meth:`choose` would. Raises the error that the device found."""
        if sampled.error is not None:
            raise self._named(sampled.error) if isinstance(sampled.error, ProcessorError) else sampled.error
        return self._with_token(sampled.token, sampled.logprobs, full)

    # --- changes of progress: cannot raise ---

    def take(self, choice: Choice) -> GeneratedToken | None:
        """Record a choice as the progress of the request, and return its token."""
        if choice.token is not None:
            self._taken().append(choice.token.token)
        self.progress = choice.progress  # the one assignment that counts
        return choice.token

    def restore(self, progress: RequestProgress) -> None:
        """Return to earlier progress. Nothing is chosen or decoded again."""
        self._edits.recount()
        self.progress = progress

    # --- logits processors that work elsewhere ---

    def prepare(self) -> None:
        """Drop logits that were kept, and have logits processors that work elsewhere begin with the next token."""
        self.progress = self.progress._replace(kept=None)
        self._edits.ready(self._taken())

    @property
    def waits(self) -> bool:
        """True while it keeps logits until its logits processors are ready."""
        return self.progress.kept is not None

    def ready(self, seconds: float = 0.0) -> bool:
        """Wait some seconds at most for its logits processors, and return True if they are ready."""
        return self._edits.ready(self._taken(), seconds)

    # --- sampling on the device ---

    @property
    def fits_device(self) -> bool:
        """True if a :class:`~trt_kvcache.generation.device_sampler.DeviceSampler` can choose its tokens."""
        return DeviceSampler.accepts(self._params)

    @property
    def fits_positions(self) -> bool:
        """True if :meth:`positions` can choose its tokens: nothing depends on the tokens before a position but the logits."""
        return self.fits_device and not self._edits.active

    def positions(self, offsets: Sequence[int]) -> Positions:
        """Return its positions at numbers of tokens after the next one, for :meth:`DeviceSampler.set_positions`."""
        seed, counter = self.sampler
        if self._row is None:
            self._row = sampling_row(self._params, seed, counter)
        return Positions(self._row, counter, self._params.logprobs, offsets)

    def enter(self, sampler: DeviceSampler, slot: int, *, stream: Any) -> None:
        """Have a sampler on the device choose the tokens after the current ones."""
        seed, counter = self.sampler
        prompt, generated = self._edits.history(self._taken())
        prompt = prompt[prompt < sampler.vocab_size]  # other ids are rows, which no logit belongs to
        sampler.set_slot(slot, self._params, seed=seed, counter=counter, prompt=prompt, generated=generated, stream=stream)

    def _taken(self) -> list[int]:
        """Return the tokens generated so far, without a copy."""
        if len(self._tokens) > self.progress.num_tokens:
            del self._tokens[self.progress.num_tokens :]  # tokens after restored progress, and one whose take() was interrupted
        return self._tokens

    def _with_token(self, token: int, logprobs: TokenLogprobs | None, full: bool) -> Choice:
        num_tokens = self.progress.num_tokens + 1
        text, text_state = "", self.progress.text
        reason: FinishReason | None = None
        if token in self._stop_tokens:
            reason = "stop"
        elif full or num_tokens >= self._params.max_new_tokens:
            reason = "length"
        if self._text is not None and text_state is not None:
            if reason != "stop":
                text, text_state = self._text.push(text_state, token)
            if reason is not None:
                rest, text_state = self._text.finish(text_state)
                text += rest
            if text_state.stopped:
                reason = "stop"
        if reason is None and self._edits.is_deferred:
            self._edits.ready((*self._taken(), token))  # the work for the token after it begins before the model runs
        progress = RequestProgress(num_tokens, reason, text_state)
        if logprobs is None:
            return Choice(GeneratedToken(self.index, token, text, reason), progress)
        return Choice(GeneratedToken(self.index, token, text, reason, logprobs.chosen, logprobs.top), progress)

    def _choose_token(self, logits: np.ndarray[Any, Any]) -> int:
        counter = self._params.counter + self.progress.num_tokens
        if not self._edits.active:
            return self._sampler.choose(logits, counter)
        try:
            edited, best = self._edits.apply(logits, self._taken())
        except ProcessorError as error:
            raise self._named(error) from error.__cause__
        return self._sampler.choose_from(edited, best, counter)

    def _named(self, error: ProcessorError) -> ProcessorError:
        named = ProcessorError(f"request {self.index}: {error}")
        named.request = self.index
        return named
