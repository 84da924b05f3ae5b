"""``DraftTree``: a draft in which a token may have several possible successors. A chain is one too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from trt_kvcache._util.checks import as_sequence, int_in_range
from trt_kvcache.errors import ShapeError


@dataclass(frozen=True)
class DraftTree:
    """A draft with several possible tokens for a position, which a :class:`Drafter` may propose in place of a sequence of tokens.

    Parameters
    ----------
    tokens : sequence of int (n,)
        Token ids. Parents come before their children.
    parents : sequence of int (n,)
        For each token the index of the token that it follows; -1 for one that follows the sequence.

    Raises
    ------
    ShapeError
        There are more or fewer parents than tokens, or one of them is no sequence.
    RangeError
        A parent is no index of an earlier token, or -1.

    Examples
    --------
    Either 7 or 9 is next, and after 9 it is 5:

    >>> from trt_kvcache import DraftTree
    >>> DraftTree([7, 9, 5], [-1, -1, 1]).depth
    2
    """

    tokens: Sequence[int]
    parents: Sequence[int]

    def __post_init__(self) -> None:
        given = as_sequence("DraftTree.tokens", self.tokens), as_sequence("DraftTree.parents", self.parents)
        tokens = tuple(int_in_range(f"DraftTree.tokens[{index}]", token, 0) for index, token in enumerate(given[0]))
        parents = tuple(int_in_range(f"DraftTree.parents[{index}]", parent, -1, index - 1) for index, parent in enumerate(given[1]))
        if len(tokens) != len(parents):
            raise ShapeError(f"DraftTree: expected a parent for each of {len(tokens)} tokens, got {len(parents)}.")
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "parents", parents)

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> DraftTree:
        """Return the tree in which each token follows the one before it."""
        return cls(tokens, range(-1, len(tokens) - 1))

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Number of tokens from the sequence to each token, itself included."""
        found: list[int] = []
        for parent in self.parents:
            found.append(1 if parent < 0 else found[parent] + 1)
        return tuple(found)

    @property
    def depth(self) -> int:
        """Tokens on the longest path."""
        return max(self.depths, default=0)

    @property
    def is_chain(self) -> bool:
        """True if each token follows the one before it."""
        return self.depth == len(self)

    def within(self, depth: int, count: int) -> DraftTree:
        """Return the tree of the first ``count`` tokens of those on paths of at most ``depth`` tokens."""
        kept = [index for index, own in enumerate(self.depths) if own <= depth][:count]
        if len(kept) == len(self):
            return self
        places = {-1: -1, **{index: place for place, index in enumerate(kept)}}
        return DraftTree([self.tokens[index] for index in kept], [places[self.parents[index]] for index in kept])

    def child(self, index: int, token: int) -> int | None:
        """Return the index of a token that follows the one at ``index``, or -1 the sequence; None if the tree has none."""
        return self._children.get((index, token))

    def num_equal(self, tokens: Sequence[int]) -> int:
        """Return the number of first tokens of ``tokens`` that are on a path."""
        index = -1
        for count, token in enumerate(tokens):
            following = self.child(index, token)
            if following is None:
                return count
            index = following
        return len(tokens)

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        """Index of each token by parent and token id, the first one of equal ones."""
        pairs = list(enumerate(zip(self.parents, self.tokens, strict=True)))
        return {key: index for index, key in reversed(pairs)}
