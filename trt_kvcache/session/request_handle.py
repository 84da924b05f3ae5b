"""``RequestHandle``: a prompt that was submitted to a session, and its state and the tokens so far."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from trt_kvcache._util.lifetime import Uncopyable
from trt_kvcache.generation.prompt_score import PromptScore
from trt_kvcache.generation.request import FinishReason, GeneratedToken
from trt_kvcache.generation.sampling import SamplerPosition

if TYPE_CHECKING:
    from trt_kvcache.session.queued_request import QueuedRequest

#: Stage of a request that has not ended.
RequestStage = Literal["queued", "prefilling", "decoding"]

#: State of a request.
RequestState = Literal["queued", "prefilling", "decoding", "finished"]


class RequestHandle(Uncopyable):
    """One submitted prompt. ``InferenceSession.submit`` makes it, ``InferenceSession.step`` advances it.

    Parameters
    ----------
    queued : QueuedRequest
        The request in the queue of the session.

    Examples
    --------
    >>> from trt_kvcache import InferenceSession
    >>> session = InferenceSession.from_model("examples/tiny-llama", engine="numpy")
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

    def __init__(self, queued: QueuedRequest) -> None:
        self._queued = queued

    def __repr__(self) -> str:
        seed = f", seed={self.seed}" if self._queued.request.sampled else ""
        return f"RequestHandle(index={self.index}, state={self.state!r}, tokens={self._queued.request.num_tokens}{seed})"

    @property
    def index(self) -> int:
        """Number of prompts that were submitted before."""
        return self._queued.request.index

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids of the prompt."""
        return self._queued.request.prompt

    @property
    def state(self) -> RequestState:
        """Its state: ``"queued"``, ``"prefilling"``, ``"decoding"`` or ``"finished"``."""
        return self._queued.state

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens generated so far, including the stop token."""
        return tuple(self._queued.request.tokens)

    @property
    def events(self) -> tuple[GeneratedToken, ...]:
        """The tokens generated so far, each with its text and, with ``SamplingParams.logprobs``, its log-probabilities."""
        return tuple(self._queued.events)

    @property
    def prompt_score(self) -> PromptScore | None:
        """Log-probabilities of the prompt, once all of it has run; None without ``prompt_logprobs`` of ``submit``."""
        return self._queued.prompt_score

    @property
    def reused_tokens(self) -> int:
        """Tokens of the prompt that were not run, because the prompt cache or another slot had them; 0 while it has no slot."""
        return self._queued.progress.reused

    @property
    def draft_tokens(self) -> int:
        """Tokens of drafts that were verified; 0 without speculative decoding."""
        drafting = self._queued.request.drafting
        return 0 if drafting is None else drafting.proposed

    @property
    def accepted_tokens(self) -> int:
        """Tokens of drafts that were accepted."""
        drafting = self._queued.request.drafting
        return 0 if drafting is None else drafting.accepted

    @property
    def started(self) -> float | None:
        """Time at which it got its first slot, by ``time.perf_counter``; None before."""
        return self._queued.progress.started

    @property
    def sampler(self) -> SamplerPosition:
        """Seed and counter of its random numbers."""
        return self._queued.request.sampler

    @property
    def seed(self) -> int:
        """The seed of its random numbers: the given one, or the one that was drawn for it."""
        return self.sampler[0]

    @property
    def text(self) -> str:
        """The text that has become certain. Empty without a tokenizer."""
        return "".join([event.text for event in self._queued.events])

    @property
    def finish_reason(self) -> FinishReason | Literal["cancelled"] | None:
        """Reason of its end: ``"stop"``, ``"length"`` or ``"cancelled"``; None while it continues."""
        return self._queued.request.finish_reason or ("cancelled" if self._queued.cancelled else None)

    @property
    def finished(self) -> bool:
        """True once it has ended."""
        return self._queued.finished

    def cancel(self) -> bool:
        """End the request where it is, and keep what it has generated. Its slot is free from the next step on.

        If it waits, it leaves the queue at once.

        Returns
        -------
        bool
            False if it had already ended: then nothing changes.

        Examples
        --------
        >>> from trt_kvcache import InferenceSession
        >>> with InferenceSession.from_model("examples/tiny-llama", engine="numpy") as session:
        ...     handle = session.submit([5, 6, 7])
        ...     handle.cancel(), handle.cancel(), handle.state, session.step()
        (True, False, 'finished', [])
        """
        if self.finished:
            return False
        self._queued.cancel()
        return True
