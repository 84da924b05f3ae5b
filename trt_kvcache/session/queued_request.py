"""``QueuedRequest``: a submitted request as the queue sees it. Its :class:`RequestHandle` is what callers get."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from trt_kvcache.generation.prompt_score import PromptScore, prompt_score, score_tokens
from trt_kvcache.generation.request import Choice, GeneratedToken, Request
from trt_kvcache.generation.token_logprobs import TokenLogprobs
from trt_kvcache.session.request_handle import RequestHandle, RequestStage, RequestState

if TYPE_CHECKING:
    from trt_kvcache._util.turns import Turns
    from trt_kvcache.session.batch import Logits


class SharedPrompt(NamedTuple):
    """Tokens at the start of a prompt that are copied from the slot of another request instead of being run."""

    source: QueuedRequest
    length: int


class Progress(NamedTuple):
    """Progress of a request in the queue, as a value. Its tokens are the progress of its :class:`Request`."""

    stage: RequestStage = "queued"
    #: ``time.perf_counter`` when it got its first slot.
    started: float | None = None
    #: Tokens at the start of its slot that were not run for it.
    reused: int = 0
    #: Prefix that its slot gets from another slot before its prompt goes on.
    shared: SharedPrompt | None = None
    #: Tokens after which the prompt cache is to keep its states, because another prompt began with them.
    divergence: int = 0
    #: Log-probabilities of the tokens of its prompt from the second one on.
    scored: tuple[TokenLogprobs, ...] = ()


class QueuedRequest:
    """One submitted request: its progress in the queue, and the tokens so far."""

    def __init__(self, request: Request, *, client: str, waiting: Turns[QueuedRequest], prompt_logprobs: int | None = None) -> None:
        self.request = request
        self.client = client
        self._waiting = waiting
        self._prompt_logprobs = prompt_logprobs
        self.progress = Progress()
        #: Ended by the caller.
        self.cancelled = False
        self.events: list[GeneratedToken] = []
        self.handle = RequestHandle(self)

    @property
    def index(self) -> int:
        """Number of prompts that were submitted before."""
        return self.request.index

    @property
    def finished(self) -> bool:
        """True once it has ended."""
        return self.cancelled or self.request.finished

    @property
    def state(self) -> RequestState:
        """Its stage, or ``"finished"``."""
        return "finished" if self.finished else self.progress.stage

    @property
    def row(self) -> list[int]:
        """The tokens that a slot must hold before the next token can be chosen: the prompt and the tokens so far."""
        return [*self.request.prompt, *self.request.tokens]

    @property
    def is_scored(self) -> bool:
        """True if its prompt is scored: then all of it is run, and the logits of all its tokens are wanted."""
        return self._prompt_logprobs is not None

    @property
    def prompt_score(self) -> PromptScore | None:
        """The score of its prompt, once all of it has run."""
        prompt, top, scored = self.request.prompt, self._prompt_logprobs, self.progress.scored
        if top is None or len(scored) < len(prompt) - 1 or self.progress.stage in ("queued", "prefilling"):
            return None
        return prompt_score(prompt, scored, with_top=top > 0)

    def scores(self, held: int, logits: Logits) -> list[TokenLogprobs]:
        """Score prompt tokens from the logits of the tokens before them. The slot held ``held`` tokens before these logits."""
        assert self._prompt_logprobs is not None
        return score_tokens(logits, self.request.prompt[held + 1 :], self._prompt_logprobs)

    def cancel(self) -> None:
        """End it where it is. If it waits, it leaves the queue."""
        self.cancelled = True
        self._waiting.discard(self.client, self)

    def take(self, choice: Choice) -> None:
        """Make a choice its progress. Doing so twice is as doing so once."""
        self.request.take(choice)
        if choice.token is not None:
            self.events[choice.progress.num_tokens - 1 :] = (choice.token,)
