"""``StepPlan``: the tokens that each slot runs, and the logits that are wanted. A prompt, a decode step and a draft are all plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, auto
from itertools import compress
from typing import NamedTuple

from trt_kvcache.session.slots import Slot

#: Token ids per slot, or per prompt.
Rows = Sequence[Sequence[int]]


class LogitsWanted(Enum):
    """Tokens of a slot whose logits are wanted."""

    NONE = auto()
    LAST = auto()
    ALL = auto()


class StepPlan(NamedTuple):
    """New tokens of the active slots, as a value. They follow the tokens that a slot holds; a slot without new tokens is idle."""

    rows: Rows
    #: New tokens of each slot.
    counts: tuple[int, ...]
    logits: Sequence[LogitsWanted]
    #: For each row the index of each token's parent in the row, -1 for a root; None if all rows are chains.
    parents: Rows | None = None

    @classmethod
    def of(cls, rows: Rows, wanted: LogitsWanted = LogitsWanted.LAST, parents: Rows | None = None) -> StepPlan:
        """Plan rows that all want the same logits, idle slots none."""
        return cls(rows, tuple(map(len, rows)), [wanted if row else LogitsWanted.NONE for row in rows], parents)

    @classmethod
    def decode(cls, tokens: Sequence[int]) -> StepPlan:
        """Plan one token for every slot."""
        count = len(tokens)
        return cls([(token,) for token in tokens], (1,) * count, (LogitsWanted.LAST,) * count)

    @property
    def increments(self) -> int | tuple[int, ...]:
        """New tokens of each slot, or of every slot if all run one: such a commit uploads nothing."""
        return 1 if self.counts.count(1) == len(self.counts) else self.counts

    @property
    def is_wide(self) -> bool:
        """True if a slot runs more than one token."""
        return max(self.counts, default=0) > 1

    @property
    def wants_all(self) -> bool:
        """True if an enqueue returns the logits of all its tokens: one slot wants them, and the others share the enqueue."""
        return LogitsWanted.ALL in self.logits

    def running(self) -> Iterable[int]:
        """Return the slots that are not idle."""
        return compress(range(len(self.rows)), self.rows)

    def accepted(self, paths: Rows) -> StepPlan:
        """Return the plan of the tokens at the indices ``paths`` of each row, as chains. They have run, so no logits are wanted."""
        return StepPlan.of([[row[index] for index in path] for row, path in zip(self.rows, paths, strict=True)], LogitsWanted.NONE)

    def applied(self, slots: Sequence[Slot]) -> list[Slot]:
        """Return the slots after the step."""
        return [slot.extended(row) if row else slot for slot, row in zip(slots, self.rows, strict=True)]
