"""``SlotState``: what one active slot of a session holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trt_kvcache.generation.sampling import SamplerPosition


class SlotState(NamedTuple):
    """What one active slot holds. Only :class:`~trt_kvcache.session.batch.Batch` makes and replaces them.

    Parameters
    ----------
    tokens : list of int
        The tokens whose K and V the slot holds, as many as its length in the cache. The list is only ever extended in place, so a
        rollback to an earlier state cuts it to the length that it had then.
    pending : tuple of int
        Tokens that come next but are not in the cache yet: usually the one that was generated last.
    reused : int
        How many tokens at the start of the slot were not run for this sequence: they were kept, restored or loaded.
    sampler : SamplerPosition or None
        Seed and counter of the request's sampler; None if its tokens are not chosen by this session.
    """

    tokens: list[int]
    pending: tuple[int, ...] = ()
    reused: int = 0
    sampler: SamplerPosition | None = None

    def extended(self, tokens: Sequence[int]) -> SlotState:
        """Return the slot after ``tokens`` were added to the cache. They take the place of pending ones."""
        self.tokens.extend(tokens)
        return SlotState(self.tokens, (), self.reused, self.sampler) if self.pending else self

    def shortened(self, length: int, pending: Sequence[int] = ()) -> SlotState:
        """Return the slot with its first ``length`` tokens in the cache, and others pending."""
        return SlotState(self.tokens[:length], tuple(pending), self.reused, self.sampler)

    def restored(self, tokens: Sequence[int]) -> SlotState:
        """Return the slot after ``tokens`` were added to the cache without running them."""
        self.tokens.extend(tokens)
        return SlotState(self.tokens, self.pending, len(self.tokens), self.sampler)

    def with_pending(self, token: int, sampler: SamplerPosition | None) -> SlotState:
        """Return the slot after its next token was chosen."""
        return SlotState(self.tokens, (token,), self.reused, sampler)

    def with_sampler(self, sampler: SamplerPosition) -> SlotState:
        """Return the slot with the sampler that chooses its tokens from now on."""
        return SlotState(self.tokens, self.pending, self.reused, sampler)
