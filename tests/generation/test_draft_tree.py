"""``DraftTree``: tokens, parents, and the paths in it."""

from __future__ import annotations

import pytest

from tests.helpers.assertions import raises
from trt_kvcache import DraftTree
from trt_kvcache.errors import RangeError, ShapeError

#: 7 or 9 next; after 9 it is 5, 5 again or 6, and 8 after the second 5.
TREE = DraftTree([7, 9, 5, 5, 6, 8], [-1, -1, 1, 1, 1, 3])


def test_depths() -> None:
    assert (TREE.depths, TREE.depth, len(TREE), TREE.is_chain) == ((1, 1, 2, 2, 2, 3), 3, 6, False)
    assert (DraftTree((), ()).depth, DraftTree((), ()).is_chain) == (0, True)


@pytest.mark.parametrize(("tokens", "parents"), [([7], None), (5, [-1])])
def test_what_is_no_sequence(tokens: object, parents: object) -> None:
    with pytest.raises(ShapeError, match=r"^DraftTree\.(tokens|parents): expected a sequence, got (int|NoneType)"):
        DraftTree(tokens, parents)  # type: ignore[arg-type]


def test_a_chain_is_a_tree() -> None:
    chain = DraftTree.chain([4, 4, 6])
    assert (chain.parents, chain.depths, chain.is_chain) == ((-1, 0, 1), (1, 2, 3), True)
    assert [chain.num_equal(tokens) for tokens in ([], [4], [4, 6], [4, 4, 6, 1], [5])] == [0, 1, 1, 3, 0]


def test_the_first_of_equal_tokens_goes_on() -> None:
    assert [TREE.child(-1, 9), TREE.child(1, 5), TREE.child(2, 8), TREE.child(3, 8), TREE.child(0, 5)] == [1, 2, None, 5, None]
    assert [TREE.num_equal(tokens) for tokens in ([9, 5, 8], [9, 6], [7, 5], [5])] == [2, 2, 1, 0]


@pytest.mark.parametrize(
    ("depth", "count", "tokens", "parents"),
    [
        (3, 6, (7, 9, 5, 5, 6, 8), (-1, -1, 1, 1, 1, 3)),
        (2, 6, (7, 9, 5, 5, 6), (-1, -1, 1, 1, 1)),
        (3, 4, (7, 9, 5, 5), (-1, -1, 1, 1)),
        (1, 6, (7, 9), (-1, -1)),
        (3, 0, (), ()),
    ],
)
def test_limits(depth: int, count: int, tokens: tuple[int, ...], parents: tuple[int, ...]) -> None:
    assert TREE.within(depth, count) == DraftTree(tokens, parents)


def test_tokens_of_a_path_that_is_too_long_leave_the_others_in_place() -> None:
    deep = DraftTree([1, 2, 3, 4], [-1, 0, 1, -1])
    assert deep.within(2, 9) == DraftTree([1, 2, 4], [-1, 0, -1])


@pytest.mark.parametrize(
    ("tokens", "parents", "error", "about"),
    [
        ([1, 2], [-1], ShapeError, "DraftTree"),
        ([1, 2], [-1, 1], RangeError, "DraftTree.parents[1]"),
        ([1, 2], [0, 0], RangeError, "DraftTree.parents[0]"),
        ([1, 2], [-1, -2], RangeError, "DraftTree.parents[1]"),
        ([1, 2.5], [-1, 0], RangeError, "DraftTree.tokens[1]"),
        ([-1], [-1], RangeError, "DraftTree.tokens[0]"),
    ],
)
def test_no_tree(tokens: list[int], parents: list[int], error: type[Exception], about: str) -> None:
    with raises(error, about):
        DraftTree(tokens, parents)
