"""The rules by which trees of draft tokens grow, in NumPy; ``plugins/draft_trees.cu`` has the same.

A tree keeps the path of the tokens that a draft model chooses, then the tokens with the largest product of probabilities on their path. Of
equal ones the first stay: tokens of the tree before new ones, which come in the order of their parents and then of their probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from trt_kvcache.kernels.host_arrays import Array
from trt_kvcache.kernels.sampling_rows import ROW_PARAMS
from trt_kvcache.kernels.token_tree import MAX_TREE_TOKENS

#: A tree so far. Parents come before their children, the chosen path first.
GROWING_TREE = np.dtype(
    [
        ("params", ROW_PARAMS),  # of the request, at the next token after the sequence
        ("scores", np.float64, MAX_TREE_TOKENS),  # sum of the log-probabilities on the path
        ("tokens", np.int32, MAX_TREE_TOKENS),
        ("parents", np.int32, MAX_TREE_TOKENS),  # -1 for a successor of the sequence
        ("depths", np.int32, MAX_TREE_TOKENS),
        ("parents_before", np.int32, MAX_TREE_TOKENS),  # indices in the tree before the last level
        ("count", np.int32),
        ("num_chosen", np.int32),
        ("limit", np.int32),
        ("max_depth", np.int32),
    ]
)


class Successors(NamedTuple):
    """Tokens that may follow a token of a tree, the likeliest first."""

    #: Index of the token; -1 for the sequence.
    parent: int
    #: The token that the draft model chooses: it comes first, with the probability of the likeliest one.
    chosen: int
    tokens: Array
    #: float32.
    logprobs: Array


def frontier(tree: Any, level: int) -> list[int]:
    """Return the tokens whose successors are a level, from 1 on; -1 for the sequence itself."""
    if level > tree["max_depth"]:
        return []
    deepest: list[int] = np.flatnonzero(tree["depths"][: tree["count"]] == level - 1).tolist()
    return deepest if level > 1 else [-1]


def grow(tree: Any, level: int, found: Sequence[Successors]) -> None:
    """Add a level from the successors of the frontier, in the order of the frontier. A token without a choice has no successors."""
    # A child is at most as probable as its parent. So a token that others displace has no descendant that would have stayed.
    # With random numbers, the large model often chooses what the draft model chooses, however improbable that is.
    count, num_chosen = int(tree["count"]), int(tree["num_chosen"])
    tokens, parents, scores = ([tree[name][:count]] for name in ("tokens", "parents", "scores"))
    is_chosen = [np.arange(count) < num_chosen]
    for one in found:
        likely = one.logprobs[: tree["limit"]]
        likely = likely[likely > -np.inf].astype(np.float64)
        tokens.append(np.array([one.chosen, *one.tokens[one.tokens != one.chosen]], np.int32)[: len(likely)])
        parents.append(np.full(len(likely), one.parent, np.int32))
        scores.append(likely + (tree["scores"][one.parent] if one.parent >= 0 else 0))
        is_chosen.append((np.arange(len(likely)) == 0) & (one.parent == num_chosen - 1))
    token, parent, score, chosen = map(np.concatenate, (tokens, parents, scores, is_chosen))
    depth = np.concatenate([tree["depths"][:count], np.full(len(token) - count, level, np.int32)])
    kept = np.sort(np.lexsort((-score, ~chosen))[: tree["limit"]])
    order = np.concatenate([kept[chosen[kept]], kept[~chosen[kept]]])
    places = np.full(len(token) + 1, -1, np.int32)  # the last one is the place of -1
    places[order] = np.arange(len(order))
    for name, values in (
        *(("tokens", token[order]), ("parents", places[parent[order]]), ("parents_before", parent[order])),
        *(("depths", depth[order]), ("scores", score[order])),
    ):
        tree[name][: len(order)] = values
    tree["count"], tree["num_chosen"] = len(order), np.count_nonzero(chosen)
