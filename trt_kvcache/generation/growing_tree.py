"""``GrowingTree``: the most probable continuations of a sequence under a draft model, level by level, as EAGLE-2 grows them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from trt_kvcache.generation.draft_tree import DraftTree


class _Node(NamedTuple):
    token: int
    parent: int  # index of a node, -1 for a successor of the sequence
    depth: int
    #: Sum of logarithms of the probabilities on the path.
    score: float
    #: True on the path of the tokens that the draft model chooses: the chain that it proposes without a tree.
    is_chosen: bool


class GrowingTree:
    """The path of the chosen tokens, then the tokens with the largest product of probabilities on their path: ``limit`` in all."""

    # A child is at most as probable as its parent. So a token that others displace has no descendant that would have stayed.

    def __init__(self, *, limit: int, depth: int) -> None:
        self._limit, self._depth = limit, min(limit, depth)
        self._nodes: list[_Node] = []
        #: Indices of the tokens whose successors come next; -1 for the sequence itself.
        self.frontier: list[int] = [-1]
        #: For each token the index of its parent in the tree before the last level was added.
        self.parents_before: list[int] = []

    @property
    def tree(self) -> DraftTree:
        """The tree so far. The chosen tokens come first, so that rows of an accepted path of them need not move."""
        return DraftTree([node.token for node in self._nodes], [node.parent for node in self._nodes])

    @property
    def depth(self) -> int:
        """Number of levels so far."""
        return max((node.depth for node in self._nodes), default=0)

    def grow(self, logits: np.ndarray[Any, Any], chosen: list[int | None]) -> None:
        """Add a level, from the logits ``[n, vocab]`` after each token of the frontier and the token that the draft model chooses."""
        level = self.depth + 1
        new = [
            node
            for parent, of_parent, token in zip(self.frontier, logits, chosen, strict=True)
            if token is not None
            for node in self._successors(parent, of_parent, token, level)
        ]
        self._keep([*self._nodes, *new])
        deepest = [index for index, node in enumerate(self._nodes) if node.depth == level]
        self.frontier = deepest if level < self._depth else []

    def _successors(self, parent: int, logits: np.ndarray[Any, Any], chosen: int, depth: int) -> list[_Node]:
        """Return the chosen token, then the others from the most probable one on. Each has the probability of its rank."""
        # With random numbers, the large model often chooses what the draft model chooses, however improbable that is.
        score, is_chosen = (self._nodes[parent].score, self._nodes[parent].is_chosen) if parent >= 0 else (0.0, True)
        count = min(self._limit, len(logits))
        best = np.argpartition(-logits, count - 1)[:count]
        best = best[np.argsort(-logits[best], kind="stable")]
        shifted = logits - logits[best[0]]
        scores = shifted[best] - np.log(np.exp(shifted).sum())
        tokens = [chosen, *(token for token in best.tolist() if token != chosen)][:count]
        return [
            _Node(token, parent, depth, score + of_rank, is_chosen and not rank)
            for rank, (token, of_rank) in enumerate(zip(tokens, scores.tolist(), strict=True))
            if of_rank > -np.inf
        ]

    def _keep(self, nodes: list[_Node]) -> None:
        """Keep the best of nodes, in which parents come before children."""
        indices = sorted(range(len(nodes)), key=lambda index: (not nodes[index].is_chosen, -nodes[index].score))[: self._limit]
        order = sorted(indices, key=lambda index: (not nodes[index].is_chosen, index))
        self.parents_before = [nodes[index].parent for index in order]
        places = {-1: -1, **{index: place for place, index in enumerate(order)}}
        self._nodes = [nodes[index]._replace(parent=places[nodes[index].parent]) for index in order]
