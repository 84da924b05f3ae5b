"""``RequestHandle``: a prompt that was submitted to a session, and what has come of it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from trt_kvcache.generation.request import FinishReason, Request
from trt_kvcache.generation.sampling import SamplingParams

#: Where a request is.
RequestState = Literal["queued", "prefilling", "decoding", "finished"]


class RequestHandle:
    """One submitted prompt. Made by ``InferenceSession.submit``, moved on by ``InferenceSession.step``.

    Parameters
    ----------
    index
        How many prompts were submitted before.
    prompt : sequence of int
    make_request : callable
        Called with SamplingParams, it returns a Request of this prompt that has no tokens.
    """

    def __init__(
        self, index: int, prompt: Sequence[int], params: SamplingParams, make_request: Callable[[SamplingParams], Request]
    ) -> None:
        self._request = make_request(params)
        self._make_request = make_request
        self._params = replace(params, seed=self._request.sampler[0])
        self._place: RequestState = "queued"
        self._cancelled = False
        self._text = ""
        #: How many prompts were submitted before.
        self.index = index
        #: Token ids of the prompt.
        self.prompt = tuple(prompt)

    def __repr__(self) -> str:
        return f"RequestHandle(index={self.index}, state={self.state!r}, tokens={len(self._request.tokens)})"

    @property
    def state(self) -> RequestState:
        """Where it is: ``"queued"``, ``"prefilling"``, ``"decoding"`` or ``"finished"``."""
        return "finished" if self.finished else self._place

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens generated so far, the stop token included."""
        return tuple(self._request.tokens)

    @property
    def text(self) -> str:
        """What has become certain of the text. Empty without a tokenizer."""
        return self._text

    @property
    def finish_reason(self) -> FinishReason | Literal["cancelled"] | None:
        """Why it ended: ``"stop"``, ``"length"`` or ``"cancelled"``; None while it goes on."""
        return self._request.finish_reason or ("cancelled" if self._cancelled else None)

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None

    def cancel(self) -> bool:
        """End it where it is, and keep what it has. Its slot is free from the next step on.

        Returns
        -------
        bool
            False if it had ended before, which stays.
        """
        if self.finished:
            return False
        self._cancelled = True
        return True

    @property
    def row(self) -> list[int]:
        """What a slot must hold before the next token can be chosen: the prompt and the tokens so far."""
        return [*self.prompt, *self._request.tokens]

    @property
    def last_token(self) -> int:
        """The token that was chosen last."""
        return self._request.tokens[-1]

    @property
    def sampler(self) -> tuple[int, int]:
        """Seed and counter of its sampler."""
        return self._request.sampler

    @property
    def mark(self) -> tuple[RequestState, int]:
        """Where it is now, for :meth:`go_back`."""
        return self._place, len(self._request.tokens)

    def move_to(self, place: RequestState) -> None:
        """Say where it is."""
        self._place = place

    def choose(self, logits: np.ndarray[Any, Any], *, full: bool) -> None:
        """Choose the next token: see :meth:`~trt_kvcache.generation.request.Request.choose`."""
        self._text += self._request.choose(logits, full=full).text

    def go_back(self, mark: tuple[RequestState, int]) -> None:
        """Be as it was when ``mark`` was taken."""
        self._place, count = mark
        counter = self._params.counter + count
        if self._request.sampler[1] != counter:
            tokens = self._request.tokens[:count]
            request = self._make_request(replace(self._params, counter=counter))
            self._text = request.replay(tokens)
            self._request = request
