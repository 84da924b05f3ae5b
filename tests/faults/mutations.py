"""Damage to files that still have their structure: random, but the same for the same seed."""

from __future__ import annotations

import copy
import json
import random
from contextlib import suppress
from typing import Any

#: Texts that ``json.dumps`` cannot write, put in place of these markers afterwards.
_RAW = {
    '"<huge>"': "9" * 5000,
    '"<deep>"': "[" * 50_000 + "]" * 50_000,
    '"<deep object>"': '{"a":' * 2000 + "1" + "}" * 2000,
    '"<exponent>"': "1e999",
}

#: Values that a field does not expect.
_ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 7, 65536, 2**31 - 1, 2**31, 2**63, 2**64, 10**30, 10**400),
    *(0.5, -0.0, 1.5, 1e308, 5e-324, float("nan"), float("inf"), float("-inf")),
    *("", "x", "float16", "0", "None", "\x00", "\ud800", "../../etc/passwd", "/dev/zero", "é" * 300, "{i}", "{0.__class__}", "%1000000d"),
    *([], [[]], [None], [1, "a", None], {}, {"a": {}}, {"content": 3}, {"": None}, ["<deep>"], [0] * 3000),
    *("<huge>", "<deep>", "<deep object>", "<exponent>"),
]


def places_in(value: Any) -> list[tuple[Any, Any]]:
    """Every item of nested objects and lists, as (container, key)."""
    found: list[tuple[Any, Any]] = []
    stack = [value]
    while stack:
        container = stack.pop()
        items = container.items() if isinstance(container, dict) else enumerate(container) if isinstance(container, list) else ()
        for key, item in items:
            found.append((container, key))
            stack.append(item)
    return found


def damage_value(data: Any, chance: random.Random) -> None:
    """Change one item of parsed JSON in place."""
    places = places_in(data)
    if not places:
        return
    container, key = chance.choice(places)
    how = chance.randrange(10)
    if how < 5:
        container[key] = copy.deepcopy(chance.choice(_ODD))  # never two of the same list: a cycle could come of it
    elif how == 5:
        del container[key]
    elif how == 6:  # the value of another item
        other, other_key = chance.choice(places)
        if other_key in other if isinstance(other, dict) else other_key < len(other):
            container[key] = json.loads(json.dumps(other[other_key])) if json.dumps(other[other_key]) else None
    elif how == 7 and isinstance(container[key], int | float) and not isinstance(container[key], bool):
        with suppress(OverflowError):  # the value may be an integer that another change made huge
            container[key] = container[key] * chance.choice([-1, 2, 0.5, 10**6]) + chance.choice([0, 1, -1])
    elif how == 8 and isinstance(container, dict):
        container[chance.choice(["unknown", key + "_", key.upper(), ""])] = container.pop(key)
    elif isinstance(container[key], list):
        container[key] = container[key] * chance.choice([0, 2, 3])
    else:
        container[key] = [container[key]]


def damage_bytes(content: bytes, chance: random.Random) -> bytes:
    """Cut, flip, insert, delete or repeat some bytes."""
    if not content:
        return b"\x00"
    how, at = chance.randrange(6), chance.randrange(len(content))
    length = min(chance.choice([1, 1, 2, 8, 64, 1000]), len(content) - at)
    if how == 0:
        return content[:at]
    if how == 1:
        return content[:at] + bytes([content[at] ^ (1 << chance.randrange(8))]) + content[at + 1 :]
    if how == 2:
        return content[:at] + chance.randbytes(length) + content[at:]
    if how == 3:
        return content[:at] + content[at + length :]
    if how == 4:
        return content[: at + length] + content[at:]
    return content[:at] + chance.choice([b"\xff", b"\x00", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"}", b'"', b",", b"\\u"]) + content[at:]


def damaged_json(content: bytes, chance: random.Random) -> bytes:
    """Damage a JSON file: mostly its values, sometimes its bytes."""
    if chance.random() < 0.2:
        return damage_bytes(content, chance)
    data = json.loads(content)
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        damage_value(data, chance)
    text = json.dumps(data)
    for marker, raw in _RAW.items():
        text = text.replace(marker, raw)
    if chance.random() < 0.05:  # keys twice: the last one counts
        text = text[:-1] + "," + text[1:] if text.startswith("{") and len(text) > 2 else text
    return text.encode()
