"""What a session has done so far: times, tokens, bytes."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SessionStatistics:
    """Counters of one session.

    Parameters
    ----------
    prefill_seconds, decode_seconds : float
        Wall time on the host, from the first enqueue until the logits were there.
    prefill_tokens : int
        Prompt tokens enqueued, padding not counted.
    reused_tokens : int
        Prompt tokens that were already in the cache.
    decode_steps, decode_tokens : int
        Enqueues of one token, and tokens of slots that were still going.
    cache_bytes_live : int
        K and V of the tokens that the active slots hold now.
    cache_bytes_reserved : int
        K and V as allocated.
    """

    prefill_seconds: float
    prefill_tokens: int
    reused_tokens: int
    decode_seconds: float
    decode_steps: int
    decode_tokens: int
    cache_bytes_live: int
    cache_bytes_reserved: int

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens per second; 0 before the first prefill."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Generated tokens per second over all slots; 0 before the first decode step."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0
