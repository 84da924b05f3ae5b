"""Statistics of a session: times, tokens, bytes."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SessionStatistics:
    """Counters of one session.

    Parameters
    ----------
    prefill_seconds, decode_seconds : float
        Wall time on the host, from the first enqueue until the logits were there.
    prefill_tokens : int
        Prompt tokens that were run; padding is not counted.
    reused_tokens : int
        Prompt tokens that did not have to be run, because their K and V were in the slot, in another slot, or in the prompt cache.
    decode_steps : int
        Enqueues of one token per slot, or of one token and a draft.
    decode_tokens : int
        Tokens of slots that took part in these steps; idle slots are not counted.
    cache_bytes_live : int
        Bytes of K and V of the tokens that the active slots hold now.
    cache_bytes_reserved : int
        Bytes of K and V as allocated.
    graph_refusals : tuple of str
        Reasons why steps that repeat ran without a CUDA graph, in the words of TensorRT, torch or CUDA, each once. Empty for engines that
        capture none.
    drafts : int
        Drafts that requests have verified: speculative decoding.
    draft_tokens, accepted_tokens : int
        Tokens of these drafts, and tokens of these that were accepted. All tokens of a tree count.

    Examples
    --------
    >>> from trt_kvcache import InferenceSession
    >>> with InferenceSession.from_model("examples/tiny-llama", engine="numpy", max_batch_size=2) as session:
    ...     _ = session.prefill([[5, 6, 7], [8]])
    ...     _ = session.decode([9, 9])
    ...     statistics = session.statistics
    >>> statistics.prefill_tokens, statistics.decode_steps, statistics.decode_tokens
    (4, 1, 2)
    """

    prefill_seconds: float
    prefill_tokens: int
    reused_tokens: int
    decode_seconds: float
    decode_steps: int
    decode_tokens: int
    cache_bytes_live: int
    cache_bytes_reserved: int
    graph_refusals: tuple[str, ...] = ()
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Share of draft tokens that were accepted; 0 before the first draft. A tree has one path accepted at most."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens of a step with a draft: the accepted ones and one more, as in vLLM. 1 before the first draft."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else 1.0

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens per second; 0 before the first prefill."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Generated tokens per second over all slots; 0 before the first decode step."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0


@dataclass
class StepCounters:
    """The counters of :class:`SessionStatistics` while they grow."""

    prefill_seconds: float = 0.0
    prefill_tokens: int = 0
    reused_tokens: int = 0
    decode_seconds: float = 0.0
    decode_steps: int = 0
    decode_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    def statistics(self, *, cache_bytes_live: int, cache_bytes_reserved: int, graph_refusals: tuple[str, ...]) -> SessionStatistics:
        """Return the counters as they are now, with the bytes of the cache."""
        return SessionStatistics(
            **vars(self), cache_bytes_live=cache_bytes_live, cache_bytes_reserved=cache_bytes_reserved, graph_refusals=graph_refusals
        )
