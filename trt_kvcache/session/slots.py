"""``Slot``: one active slot of a session, as a value. A step makes new values, and :meth:`Runner.apply` makes them current."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trt_kvcache.generation.sampling import SamplerPosition


class Slot(NamedTuple):
    """Tokens of one sequence: those in the cache, those pending, and the position of the sampler that chose them."""

    #: Append-only, and shared by all values of a sequence, each of which reads its first ``length`` entries. So a step costs the same for
    #: any number of tokens, and a value that was never made current leaves the others as they are.
    row: list[int]
    length: int
    #: Chosen, and not in the cache yet.
    pending: tuple[int, ...] = ()
    #: Tokens at the start of the row that were not run for its sequence.
    reused: int = 0
    sampler: SamplerPosition | None = None
    #: Tokens at the end that its request has generated.
    generated: int = 0
    #: Tokens at the start of the row whose K and V were copied into the slot without their hidden states.
    copied: int = 0
    #: Adapter that computed K, V and states; None for the base model.
    adapter: str | None = None

    @property
    def tokens(self) -> list[int]:
        """Tokens in the cache."""
        return self.row[: self.length]

    def extended(self, tokens: Sequence[int]) -> Slot:
        """Add tokens that were run, in place of the pending ones. If they are others, no request has generated them."""
        generated = self.generated if tuple(tokens) == self.pending else 0
        row = self._row_with(tokens)
        return Slot(row, len(row), (), self.reused, self.sampler, generated, self.copied, self.adapter)

    def restored(self, tokens: Sequence[int]) -> Slot:
        """Add tokens that are in the cache without having been run."""
        row = self._row_with(tokens)
        return Slot(row, len(row), self.pending, len(row), self.sampler, self.generated, len(row), self.adapter)

    def shortened(self, length: int, pending: Sequence[int] = ()) -> Slot:
        """Keep the first ``length`` tokens, with others pending."""
        dropped = self.length + len(self.pending) - length - len(pending)
        generated = max(0, self.generated - dropped)
        return Slot(self.row, length, tuple(pending), self.reused, self.sampler, generated, min(self.copied, length), self.adapter)

    def chosen(self, token: int, sampler: SamplerPosition | None, generated: int) -> Slot:
        """Add a token that was chosen to the pending ones.

        Other tokens may be pending before it: a full slot gives back its last tokens while its request waits.
        """
        return Slot(self.row, self.length, (*self.pending, token), self.reused, sampler, generated, self.copied, self.adapter)

    def committed(self, count: int) -> Slot:
        """Count the first pending tokens as tokens in the cache."""
        row = self._row_with(self.pending[:count])
        return self._replace(row=row, length=len(row), pending=self.pending[count:])

    def _row_with(self, tokens: Sequence[int]) -> list[int]:
        """Return a row of the tokens in the cache and others: the shared one, unless a value that is not current has appended to it."""
        row = self.row if len(self.row) == self.length else self.row[: self.length]
        row.extend(tokens)
        return row
