"""``QueuedRequest``: a submitted request as the queue sees it. What callers see of it is a :class:`RequestHandle`."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np

from trt_kvcache._util.turns import Turns
from trt_kvcache.generation.prompt_score import PromptScore
from trt_kvcache.generation.request import GeneratedToken, Request, RequestProgress
from trt_kvcache.generation.sampling import check_logits
from trt_kvcache.generation.token_logprobs import TokenLogprobs, token_logprobs
from trt_kvcache.session.request_handle import RequestHandle, RequestStage, RequestState


class SharedPrompt(NamedTuple):
    """Tokens at the start of a prompt that are copied from the slot of another request instead of being run."""

    source: QueuedRequest
    length: int


#: What a :class:`QueuedRequest` needs to return to an earlier state: stage, text, what it did not run and what it waits for,
#: log-probabilities of the prompt, and its request's.
QueuedSavepoint = tuple[RequestStage, str, tuple[int, SharedPrompt | None], tuple[list[TokenLogprobs], int], RequestProgress]


class QueuedRequest:
    """One submitted request in the queue: where it is, what it has generated, and how it goes on."""

    def __init__(self, request: Request, *, client: str, waiting: Turns[QueuedRequest], prompt_logprobs: int | None = None) -> None:
        #: What chooses its tokens.
        self.request = request
        #: Whose request it is.
        self.client = client
        self._waiting = waiting
        self._prompt_logprobs = prompt_logprobs
        self._scored: list[TokenLogprobs] = []
        #: Tokens at the start of its slot that were not run for it.
        self.reused = 0
        #: What its slot gets of another one before its prompt goes on; None if it waits for nothing.
        self.shared: SharedPrompt | None = None
        #: Tokens after which the prompt cache is to keep its states, as another prompt began with them too.
        self.parting = 0
        #: Where it is, or where it was when it ended.
        self.stage: RequestStage = "queued"
        #: When it got a slot, by ``time.perf_counter``.
        self.started: float | None = None
        #: Whether the caller ended it.
        self.cancelled = False
        #: The text that has become certain.
        self.text = ""
        #: The tokens generated so far.
        self.events: list[GeneratedToken] = []
        #: What callers see of it.
        self.handle = RequestHandle(self)

    @property
    def index(self) -> int:
        """How many prompts were submitted before."""
        return self.request.index

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.cancelled or self.request.finished

    @property
    def state(self) -> RequestState:
        """Where it is."""
        return "finished" if self.finished else self.stage

    @property
    def row(self) -> list[int]:
        """What a slot must hold before the next token can be chosen: the prompt and the tokens so far."""
        return [*self.request.prompt, *self.request.tokens]

    @property
    def last_token(self) -> int:
        """The token that was chosen last."""
        return self.request.last_token

    @property
    def is_scored(self) -> bool:
        """Whether its prompt is scored: then all of it is run, and the logits of all its tokens are wanted."""
        return self._prompt_logprobs is not None

    @property
    def prompt_score(self) -> PromptScore | None:
        """The score of its prompt, once all of it has run."""
        prompt, top = self.request.prompt, self._prompt_logprobs
        if top is None or len(self._scored) < len(prompt) - 1 or self.stage in ("queued", "prefilling"):
            return None
        return PromptScore(
            tokens=prompt,
            logprobs=(None, *(one.chosen for one in self._scored)),
            top_logprobs=(None, *(one.top for one in self._scored)) if top else None,
        )

    def cancel(self) -> None:
        """End it where it is. If it waits, it leaves the queue."""
        self.cancelled = True
        self._waiting.discard(self.client, self)

    def begin(self, reused: int) -> None:
        """Begin its prompt in a slot that holds ``reused`` tokens of it."""
        self.stage = "prefilling"
        self.started = time.perf_counter() if self.started is None else self.started
        self.reused = reused
        self.shared = None
        self.parting = 0
        self._scored = []
        self.request.prepare()

    def take_prompt_logits(self, held: int, logits: np.ndarray[Any, Any]) -> None:
        """Score the tokens of the prompt that follow those whose logits are there."""
        assert self._prompt_logprobs is not None
        for row, token in zip(logits, self.request.prompt[held + 1 :], strict=False):
            check_logits(row)
            self._scored.append(token_logprobs(row, token, self._prompt_logprobs))

    def add(self, event: GeneratedToken) -> None:
        """Add the token that its request has taken."""
        self.events.append(event)
        self.text += event.text

    def savepoint(self) -> QueuedSavepoint:
        """Return the state now, for one :meth:`rollback`."""
        return self.stage, self.text, (self.reused, self.shared), (self._scored, len(self._scored)), self.request.progress

    def rollback(self, savepoint: QueuedSavepoint) -> None:
        """Return to the state at ``savepoint``. A request that was cancelled since stays cancelled."""
        self.stage, self.text, (self.reused, self.shared), (self._scored, num_scored), progress = savepoint
        del self._scored[num_scored:]
        self.request.restore(progress)
        del self.events[self.request.num_tokens :]
