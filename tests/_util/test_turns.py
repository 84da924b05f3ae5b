"""``Turns``: a place is for the client with the fewest places, then for the one that waits longest; clients that left have no state."""

from __future__ import annotations

import random

from trt_kvcache._util.turns import Turns


def lines(**items: str) -> Turns[str]:
    turns: Turns[str] = Turns()
    for client, line in items.items():
        for item in line.split():
            turns.add(client, item)
    return turns


def test_of_one_client_the_first_is_first():
    assert lines(a="1 2 3").first(2, {"a": 5}) == ["1", "2"]


def test_clients_take_turns():
    assert lines(a="a1 a2 a3 a4", b="b1 b2", c="c1").first(9, {}) == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


def test_a_client_with_fewer_places_is_first():
    assert lines(a="a1 a2", b="b1 b2 b3").first(4, {"a": 2}) == ["b1", "b2", "a1", "b3"]


def test_a_client_that_has_had_its_turn_is_behind_the_others():
    turns = lines(a="a1", b="b1", c="c1")
    turns.end_turn("b")
    assert turns.first(3, {}) == ["a1", "c1", "b1"]


def test_clients_that_come_later_do_not_overtake():
    turns = lines(a="a1")
    for number in range(100):
        turns.add(f"new {number}", f"new {number}")
    assert turns.first(1, {}) == ["a1"]


def test_looking_changes_nothing():
    turns = lines(a="a1 a2", b="b1")
    assert turns.first(2, {"a": 1}) == turns.first(2, {"a": 1})
    assert (len(turns), turns.num_clients) == (3, 2)


def test_no_state_is_left_of_clients_that_have_left():
    turns: Turns[int] = Turns()
    for number in range(10_000):
        turns.add(f"client {number}", number)
        turns.end_turn(f"client {number}")
        assert turns.discard(f"client {number}", number)
        assert not turns.discard(f"client {number}", number)
    assert (len(turns), turns.num_clients, turns._lines) == (0, 0, {})


def by_definition(order: dict[str, list[int]], held: dict[str, int], free: int) -> list[int]:
    """The same, place by place: of the clients in the order of their turns the first of those with the fewest places."""
    left = [(client, list(line)) for client, line in order.items()]
    has, found = dict(held), list[int]()
    while len(found) < free and any(line for _, line in left):
        one = min((entry for entry in left if entry[1]), key=lambda entry: has.get(entry[0], 0))
        found.append(one[1].pop(0))
        has[one[0]] = has.get(one[0], 0) + 1
        left.remove(one)
        left.append(one)
    return found


def test_random_lines():
    for seed in range(500):
        chance, turns, order = random.Random(seed), Turns[int](), dict[str, list[int]]()
        for item in range(chance.randrange(30)):
            client = chance.choice("abcde")
            what = chance.random()
            if what < 0.7:
                turns.add(client, item)
                order.setdefault(client, []).append(item)
            elif client in order and what < 0.85:
                turns.end_turn(client)
                order[client] = order.pop(client)
            elif client in order:
                gone = chance.choice(order[client])
                turns.discard(client, gone)
                order[client].remove(gone)
                order = {name: line for name, line in order.items() if line}
        held = {client: chance.randrange(3) for client in "abc"}
        assert turns.first(seed % 8, held) == by_definition(order, held, seed % 8), seed
