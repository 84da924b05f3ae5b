"""Configuration and statistics of an engine, records of its requests, and their observers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import reduce
from operator import add
from typing import Protocol

from trt_kvcache.session.request_handle import RequestState
from trt_kvcache.session.session import InferenceSession
from trt_kvcache.session.statistics import SessionStatistics


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Configuration of an engine, for a router or a server.

    Parameters
    ----------
    model : str
        The name of the model for clients.
    context_length : int
        Tokens of a slot: prompt and answer.
    max_num_seqs : int
        Number of slots: requests that run at once.
    max_queue : int
        Number of requests that may wait for a slot.
    vocab_size : int
        Token ids range from 0 to ``vocab_size - 1``.
    eos_token_ids : tuple of int
        The model's end tokens.
    has_chat_template : bool
        True if the model has a chat template.
    scores_prompts : bool
        True if it accepts ``prompt_logprobs``: the engine returns the logits of several tokens per slot.
    adapters : tuple of str
        Names of the adapters that requests may choose.
    """

    model: str
    context_length: int
    max_num_seqs: int
    max_queue: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    scores_prompts: bool
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True)
class SlotUse:
    """State of a slot.

    Parameters
    ----------
    request : int
        Index of its request.
    state : str
        ``"prefilling"``, ``"decoding"``, or ``"finished"`` until the next step.
    tokens : int
        Tokens of prompt and answer so far.
    """

    request: int
    state: RequestState
    tokens: int


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Statistics of an engine: its current state, and its totals.

    Parameters
    ----------
    slots : tuple of SlotUse
        The slots in use.
    waiting : int
        Number of requests in the queue.
    waiting_clients : int
        Number of clients with requests in the queue.
    prompt_cache_hits, prompt_cache_misses, prompt_cache_bytes : int
        Counters and size of the prefix cache.
    session : SessionStatistics
        Tokens, steps, bytes of K and V.
    """

    slots: tuple[SlotUse, ...]
    waiting: int
    waiting_clients: int
    prompt_cache_hits: int
    prompt_cache_misses: int
    prompt_cache_bytes: int
    session: SessionStatistics

    @classmethod
    def of(cls, session: InferenceSession) -> EngineStats:
        """Return the statistics of a session. Call it in the thread of the session."""
        cache = session.prompt_cache
        return cls(
            slots=tuple(SlotUse(one.index, one.state, len(one.prompt) + len(one.tokens)) for one in session.running_requests),
            waiting=session.num_waiting_requests,
            waiting_clients=session.num_waiting_clients,
            prompt_cache_hits=cache.hits,
            prompt_cache_misses=cache.misses,
            prompt_cache_bytes=cache.nbytes,
            session=session.statistics,
        )

    @classmethod
    def together(cls, parts: Sequence[EngineStats]) -> EngineStats:
        """Return the statistics of several engines as one: sums, and the slots of all.

        Parameters
        ----------
        parts : sequence of EngineStats
            Statistics of each engine, at least one.

        Returns
        -------
        EngineStats
            Totals.
        """
        sessions = [part.session for part in parts]
        return cls(
            slots=tuple(slot for part in parts for slot in part.slots),
            waiting=sum(part.waiting for part in parts),
            waiting_clients=sum(part.waiting_clients for part in parts),
            prompt_cache_hits=sum(part.prompt_cache_hits for part in parts),
            prompt_cache_misses=sum(part.prompt_cache_misses for part in parts),
            prompt_cache_bytes=sum(part.prompt_cache_bytes for part in parts),
            session=SessionStatistics(
                **{one.name: reduce(add, [getattr(of, one.name) for of in sessions]) for one in fields(SessionStatistics)}
            ),
        )


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """Outcome of one answer to a request.

    Parameters
    ----------
    prompt_tokens, cached_tokens, generated_tokens : int
        Tokens of the prompt, prompt tokens that were cached, tokens of the answer.
    submitted : float
        Time when it was submitted, by ``time.perf_counter``.
    times : tuple of float
        Time when each token was generated, by the same clock; it may have been read later.
    finish_reason : str
        ``"stop"``, ``"length"``, ``"cancelled"`` or ``"error"``.
    started : float or None
        Time when it got a slot, by the same clock. None if it did not, or if that is not known.
    """

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    submitted: float
    times: tuple[float, ...]
    finish_reason: str
    started: float | None = None


class EngineObserver(Protocol):
    """Gets the outcomes of requests, in the event loop."""

    def ended(self, record: RequestRecord) -> None:
        """Take the record of an answer that has ended."""

    def refused(self) -> None:
        """Count a request that was refused because the queue was full."""
