"""``GrowingTree``: the most probable continuations of a sequence under a draft model, level by level, as EAGLE-2 grows them."""

from __future__ import annotations

from typing import Any

import numpy as np

from trt_kvcache.generation.draft_tree import DraftTree
from trt_kvcache.kernels.growing_trees import GROWING_TREE, Successors, frontier, grow
from trt_kvcache.kernels.most_likely import log_probabilities


class GrowingTree:
    """The path of the chosen tokens, then the tokens with the largest product of probabilities on their path: ``limit`` in all."""

    def __init__(self, *, limit: int, depth: int) -> None:
        self._tree = np.zeros(1, GROWING_TREE)[0]
        self._tree["limit"], self._tree["max_depth"] = limit, min(limit, depth)
        #: Number of levels so far.
        self.depth = 0

    @property
    def tree(self) -> DraftTree:
        """The tree so far. The chosen tokens come first, so that rows of an accepted path of them need not move."""
        return tree_of(self._tree)

    @property
    def frontier(self) -> list[int]:
        """Indices of the tokens whose successors come next; -1 for the sequence itself."""
        return frontier(self._tree, self.depth + 1)

    @property
    def parents_before(self) -> list[int]:
        """For each token the index of its parent in the tree before the last level was added."""
        before: list[int] = self._tree["parents_before"][: self._tree["count"]].tolist()
        return before

    def grow(self, logits: np.ndarray[Any, Any], chosen: list[int | None]) -> None:
        """Add a level, from the logits ``[n, vocab]`` after each token of the frontier and the token that the draft model chooses."""
        found = []
        for parent, of_parent, token in zip(self.frontier, logits, chosen, strict=True):
            if token is not None:
                _, likely, logprobs = log_probabilities(of_parent, token, int(self._tree["limit"]))
                found.append(Successors(parent, token, likely, logprobs.astype(np.float32)))
        self.depth += 1
        grow(self._tree, self.depth, found)


def tree_of(tree: Any) -> DraftTree:
    """Return a ``GROWING_TREE`` as a draft."""
    count = tree["count"]
    return DraftTree(tree["tokens"][:count].tolist(), tree["parents"][:count].tolist())
