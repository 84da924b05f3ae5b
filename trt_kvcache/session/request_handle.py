"""``RequestHandle``: a prompt that was submitted to a session, and its state and the tokens so far."""

from typing import Any, Literal

import numpy as np

from trt_kvcache._util.lifetime import Uncopyable
from trt_kvcache.generation.request import FinishReason, GeneratedToken, Request, RequestSavepoint
from trt_kvcache.generation.sampling import SamplerPosition

#: Where a request that has not ended is.
RequestStage = Literal["queued", "prefilling", "decoding"]

#: Where a request is.
RequestState = Literal["queued", "prefilling", "decoding", "finished"]


#: What a :class:`RequestHandle` needs to return to an earlier state: stage, text, and its request's.
HandleSavepoint = tuple[RequestStage, str, RequestSavepoint]


class RequestHandle(Uncopyable):
    """One submitted prompt. ``InferenceSession.submit`` makes it, ``InferenceSession.step`` advances it.

    Parameters
    ----------
    request : Request
        Its prompt, without tokens so far. Its index is how many prompts were submitted before.

    Examples
    --------
    >>> from trt_kvcache import InferenceSession
    >>> session = InferenceSession.from_model("examples/tiny-llama", engine="reference")
    >>> handle = session.submit([5, 6, 7], max_new_tokens=2, ignore_eos=True)
    >>> handle.state
    'queued'
    >>> while session.step():
    ...     pass
    >>> handle
    RequestHandle(index=0, state='finished', tokens=2)
    >>> handle.finish_reason
    'length'
    >>> session.close()
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._stage: RequestStage = "queued"
        self._cancelled = False
        self._text = ""
        self._events: list[GeneratedToken] = []
        self._num_read = 0

    def __repr__(self) -> str:
        seed = f", seed={self.seed}" if self._request.sampled else ""
        return f"RequestHandle(index={self.index}, state={self.state!r}, tokens={len(self._request.tokens)}{seed})"

    @property
    def index(self) -> int:
        """How many prompts were submitted before."""
        return self._request.index

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids of the prompt."""
        return self._request.prompt

    @property
    def state(self) -> RequestState:
        """Where it is: ``"queued"``, ``"prefilling"``, ``"decoding"`` or ``"finished"``."""
        return "finished" if self.finished else self._stage

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens generated so far, including the stop token."""
        return tuple(self._request.tokens)

    @property
    def events(self) -> tuple[GeneratedToken, ...]:
        """The tokens generated so far, each with its text and, with ``SamplingParams.logprobs``, its log-probabilities."""
        return tuple(self._events)

    @property
    def seed(self) -> int:
        """The seed of its random numbers: the given one, or the one that was drawn for it."""
        return self._request.sampler[0]

    @property
    def text(self) -> str:
        """The text that has become certain. Empty without a tokenizer."""
        return self._text

    @property
    def finish_reason(self) -> FinishReason | Literal["cancelled"] | None:
        """Why it ended: ``"stop"``, ``"length"`` or ``"cancelled"``; None while it continues."""
        return self._request.finish_reason or ("cancelled" if self._cancelled else None)

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None

    def cancel(self) -> bool:
        """End the request where it is, and keep what it has generated. Its slot is free from the next step on.

        Returns
        -------
        bool
            False if it had already ended: then nothing changes.

        Examples
        --------
        >>> from trt_kvcache import InferenceSession
        >>> with InferenceSession.from_model("examples/tiny-llama", engine="reference") as session:
        ...     handle = session.submit([5, 6, 7])
        ...     handle.cancel(), handle.cancel(), handle.state, session.step()
        (True, False, 'finished', [])
        """
        if self.finished:
            return False
        self._cancelled = True
        return True

    # --- for the queue and its readers ---

    def new_events(self) -> list[GeneratedToken]:
        """Return the tokens that came since the last call of this method."""
        new = self._events[self._num_read :]
        self._num_read += len(new)
        return new

    @property
    def row(self) -> list[int]:
        """What a slot must hold before the next token can be chosen: the prompt and the tokens so far."""
        return [*self._request.prompt, *self._request.tokens]

    @property
    def last_token(self) -> int:
        """The token that was chosen last."""
        return self._request.tokens[-1]

    @property
    def sampler(self) -> SamplerPosition:
        """Seed and counter of its sampler."""
        return self._request.sampler

    def move_to(self, stage: RequestStage) -> None:
        """Record where it is now."""
        self._stage = stage

    @property
    def generated(self) -> int:
        """Number of tokens generated so far."""
        return self._request.generated

    def choose(self, logits: np.ndarray[Any, Any], *, full: bool) -> None:
        """Choose the next token: see ``Request.choose``."""
        event = self._request.choose(logits, full=full)
        self._events.append(event)
        self._text += event.text

    def savepoint(self) -> HandleSavepoint:
        """Return the state now, for one :meth:`rollback`."""
        return self._stage, self._text, self._request.savepoint()

    def rollback(self, savepoint: HandleSavepoint) -> None:
        """Return to the state at ``savepoint``. A request that was cancelled since stays cancelled."""
        self._stage, self._text, request = savepoint
        self._request.rollback(request)
        del self._events[len(self._request.tokens) :]
