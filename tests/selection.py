"""The pytest options ``--part`` and ``--each-value``, which select tests. Both choose by the names of tests: two runs select the same."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence

import pytest


def add_options(parser: pytest.Parser) -> None:
    """Add the options to pytest."""
    parser.addoption("--part", metavar="K/N", help="run the K-th of N parts of the tests, divided by their names: 1/6 to 6/6 are all")
    parser.addoption(
        "--each-value",
        action="store_true",
        help="of a test with several parameters, run so many combinations that each value of each parameter is in one of them",
    )


class Selection:
    """The hook that deselects tests: after the marks of ``-m``, or a value whose only chosen combination is left out would not run."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept = items
        if config.option.part:
            kept = _part(config.option.part, kept)
        if config.option.each_value:
            kept = _each_value(kept)
        chosen = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = kept


def _part(option: str, items: Sequence[pytest.Item]) -> list[pytest.Item]:
    part, parts = map(int, option.split("/"))
    if not 1 <= part <= parts:
        raise pytest.UsageError(f"--part: expected K/N with K from 1 to N, got {option}")
    return [item for item in items if _number(item) % parts == part - 1]


def _each_value(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the tests of which each has a value of a parameter that those before it, in the order of their numbers, have not."""
    seen: dict[str, set[tuple[str, int]]] = defaultdict(set)  # parameters and the identities of their values, which combinations share
    chosen = set()
    for item in sorted(items, key=_number):
        spec = getattr(item, "callspec", None)
        values = {("", 0)} if spec is None else {(name, id(value)) for name, value in spec.params.items()}
        of_test = seen[item.nodeid.partition("[")[0]]
        if not values <= of_test:
            chosen.add(item.nodeid)
            of_test |= values
    return [item for item in items if item.nodeid in chosen]


def _number(item: pytest.Item) -> int:
    return zlib.crc32(item.nodeid.encode())
