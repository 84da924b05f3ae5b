"""``GrowingTree``: the path of the chosen tokens, and the most probable other ones, whatever the model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from trt_kvcache.generation.draft_tree import DraftTree
from trt_kvcache.generation.growing_tree import GrowingTree

VOCAB = 7

Model = Callable[[tuple[int, ...]], np.ndarray]


def model_of(seed: int, scale: float = 2.0) -> Model:
    """Return a model with random logits after each sequence of tokens."""

    def logits(tokens: tuple[int, ...]) -> np.ndarray:
        return (np.random.default_rng([seed, *tokens]).normal(size=VOCAB) * scale).astype(np.float32)

    return logits


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def grown(model: Model, choose: Callable[[np.ndarray], int | None], *, limit: int, depth: int) -> tuple[DraftTree, int]:
    """Return a tree, and the number of levels of it that ran."""
    growing, levels = GrowingTree(limit=limit, depth=depth), 0
    while growing.frontier:
        paths = {-1: (), **dict(enumerate(paths_of(growing.tree)))}
        logits = np.array([model(paths[index]) for index in growing.frontier])
        growing.grow(logits, [choose(row) for row in logits])
        levels += 1
    return growing.tree, levels


def greedy(logits: np.ndarray) -> int:
    return int(logits.argmax())


def best_paths(model: Model, depth: int, choose: Callable[[np.ndarray], int]) -> list[tuple[int, ...]]:
    """Return all paths of up to ``depth`` tokens, the best first. A chosen token counts as the most probable one, the others follow it."""
    found: list[tuple[float, tuple[int, ...]]] = []
    last: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for _ in range(depth):
        following = []
        for score, path in last:
            logits = model(path).astype(np.float64)
            scores = np.sort(logits)[::-1] - np.log(np.exp(logits).sum())
            chosen = choose(logits)
            tokens = [chosen, *(token for token in logits.argsort()[::-1].tolist() if token != chosen)]
            following += [(score + one, (*path, token)) for token, one in zip(tokens, scores, strict=True)]
        found += following
        last = following
    return [path for _, path in sorted(found, reverse=True)]


@pytest.mark.parametrize("choose", [greedy, lambda logits: int(logits.argsort()[2])], ids=["greedy", "sampled"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("limit", "depth"), [(3, 3), (8, 3), (20, 2), (12, 4)])
def test_the_chosen_path_and_the_most_probable_others(seed: int, limit: int, depth: int, choose: Callable[[np.ndarray], int]) -> None:
    model = model_of(seed)
    tree, levels = grown(model, choose, limit=limit, depth=depth)
    main: list[tuple[int, ...]] = []
    while len(main) < depth:
        before = main[-1] if main else ()
        main.append((*before, choose(model(before))))
    others = [path for path in best_paths(model, depth, choose) if path not in main]
    paths = paths_of(tree)
    assert paths[:depth] == main
    assert set(paths[depth:]) == set(others[: limit - depth])
    assert (len(paths), levels) == (limit, depth)


def test_a_chain_that_is_as_long_as_the_limit_has_no_branches() -> None:
    tree, _ = grown(model_of(1), greedy, limit=4, depth=15)
    assert (tree.is_chain, len(tree)) == (True, 4)


def test_tokens_without_a_probability_are_left_out() -> None:
    def two(tokens: tuple[int, ...]) -> np.ndarray:
        logits = np.full(VOCAB, -np.inf, np.float32)
        logits[[2, 5]] = 1, 0
        return logits

    tree, _ = grown(two, greedy, limit=30, depth=2)
    assert sorted(paths_of(tree)) == [(2,), (2, 2), (2, 5), (5,), (5, 2), (5, 5)]


def test_logits_without_a_choice_end_a_path() -> None:
    tree, levels = grown(model_of(2), lambda logits: None, limit=5, depth=3)
    assert (len(tree), levels) == (0, 1)
