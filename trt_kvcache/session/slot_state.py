"""``SlotState``: what one active slot of a session holds."""

from __future__ import annotations

from collections.abc import Sequence

from trt_kvcache.generation.sampling import SamplerPosition

#: What a :class:`SlotState` needs to return to an earlier state: its fields then.
SlotSavepoint = tuple[list[int], tuple[int, ...], int, SamplerPosition | None, int]


class SlotState:
    """What one active slot holds. Only :class:`~trt_kvcache.session.batch.Batch` makes and changes them."""

    __slots__ = ("generated", "pending", "reused", "sampler", "tokens")

    def __init__(
        self,
        tokens: list[int],
        *,
        pending: tuple[int, ...] = (),
        reused: int = 0,
        sampler: SamplerPosition | None = None,
        generated: int = 0,
    ) -> None:
        self.tokens = tokens
        self.pending = pending
        self.reused = reused
        self.sampler = sampler
        self.generated = generated

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens that were run. They take the place of pending ones; if they are others, no request has generated them."""
        if self.generated and tuple(tokens) != self.pending:
            self.generated = 0
        self.tokens.extend(tokens)
        self.pending = ()

    def restore(self, tokens: Sequence[int]) -> None:
        """Add tokens that are in the cache now without being run."""
        self.tokens.extend(tokens)
        self.reused = len(self.tokens)

    def shorten(self, length: int, pending: Sequence[int] = ()) -> None:
        """Keep the first ``length`` tokens, with others pending."""
        dropped = len(self.tokens) + len(self.pending) - length - len(pending)
        self.generated = max(0, self.generated - dropped)
        self.tokens = self.tokens[:length]
        self.pending = tuple(pending)

    def savepoint(self) -> SlotSavepoint:
        """Return the state now, for one :meth:`rollback`. It costs the same for any number of tokens."""
        return self.tokens, self.pending, self.reused, self.sampler, self.generated

    def rollback(self, savepoint: SlotSavepoint, length: int) -> None:
        """Return to the state at ``savepoint``, when the slot held ``length`` tokens.

        Between the two, tokens are only ever added to the list, or another list takes its place: so the old one is cut to its length.
        """
        self.tokens, self.pending, self.reused, self.sampler, self.generated = savepoint
        del self.tokens[length:]
