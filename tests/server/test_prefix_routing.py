"""Which engine gets a prompt: the one that has its beginning, unless it has more to do than that saves."""

import pytest

from trt_kvcache.errors import RangeError
from trt_kvcache.server.prefix_routing import PrefixRouting

ENGINES = ("a", "b", "c")


@pytest.fixture
def routing():
    return PrefixRouting[str](block_tokens=4)


def run(routing, tokens, engine):
    """Give a prompt to an engine, and let it end."""
    routing.begin("one", tokens, engine)
    routing.end("one")


def test_the_next_turn_goes_where_the_chat_began(routing):
    run(routing, range(10), "b")
    run(routing, range(50, 60), "c")
    assert routing.order(range(14), ENGINES)[0] == "b"
    assert routing.order(range(50, 64), ENGINES)[0] == "c"


def test_a_block_counts_only_behind_the_same_tokens(routing):
    run(routing, [1, 2, 3, 4, 5, 6, 7, 8], "b")
    assert routing.order([9, 9, 9, 9, 5, 6, 7, 8], ENGINES)[0] == "a"


def test_the_longest_beginning_in_common_decides(routing):
    run(routing, [*range(8), 90, 91, 92, 93], "a")
    run(routing, range(12), "b")
    assert routing.order(range(16), ENGINES)[0] == "b"


def test_prompts_that_have_nothing_in_common_go_round(routing):
    for expected in ("a", "b", "c", "a"):
        found = routing.order([7, 8, 9], ENGINES)[0]
        assert found == expected
        run(routing, [7, 8, 9], found)


def test_an_engine_that_has_more_to_do_than_a_beginning_saves_is_not_the_first(routing):
    run(routing, range(8), "b")
    routing.begin("short", [1] * 7, "b")
    assert routing.order(range(10), ENGINES)[0] == "b"
    routing.begin("another", [1] * 2, "b")
    assert routing.order(range(10), ENGINES)[0] != "b"
    routing.end("another")
    assert routing.order(range(10), ENGINES)[0] == "b"


def test_an_engine_that_is_gone_is_forgotten_with_what_it_ran(routing):
    run(routing, range(8), "b")
    routing.begin("cut off", range(100), "b")
    routing.forget("b")
    routing.end("cut off")
    run(routing, [1], "a")
    run(routing, [1], "c")
    assert routing.order(range(8), ENGINES)[0] == "b", "the one that was given nothing"


def test_an_engine_that_cannot_take_more_is_left_out(routing):
    run(routing, range(8), "b")
    assert routing.order(range(8), ["a", "c"]) == ["a", "c"]


def test_what_was_not_seen_for_the_longest_time_is_forgotten_first():
    routing = PrefixRouting[str](block_tokens=1, max_blocks=4)
    for tokens in ([1, 2], [3, 4], [1, 2], [5, 6]):
        run(routing, tokens, "b")
    assert routing.order([1, 2], ("a", "b"))[0] == "b"
    assert routing.order([3, 4], ("a", "b"))[0] == "a"


@pytest.mark.parametrize("options", [{"block_tokens": 0}, {"max_blocks": 0}])
def test_numbers_are_checked(options):
    [name] = options
    with pytest.raises(RangeError, match=f"{name}: expected"):
        PrefixRouting[str](**options)
