"""Tests that go over every case with every value: a part of them for each change, all of them in ``make test-all``."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

_Params = type(pytest.param())


def one_of_each_family(cases: Iterable[Any]) -> list[Any]:
    """Return cases: names of golden models, ``family`` or ``family-configuration``, or tuples that begin with one.

    The first configuration of each family is unmarked, in all of its cases; the others are slow.
    """
    first: dict[str, str] = {}
    found = []
    for arguments in (case if isinstance(case, tuple) else (case,) for case in cases):
        name = arguments[0]
        is_first = first.setdefault(name.partition("-")[0], name) == name
        found.append(pytest.param(*arguments, marks=[] if is_first else pytest.mark.slow))
    return found


def each_once(cases: Iterable[Any], values: Sequence[Any]) -> list[Any]:
    """Return each case with each value. One value a case is unmarked, in turns; the others are slow.

    A case is a name, a tuple of arguments, or a ``pytest.param`` whose marks its values have too.
    """
    return [
        pytest.param(*one.values, value, marks=[*one.marks, *([] if number == index % len(values) else [pytest.mark.slow])])
        for index, one in enumerate(map(_param, cases))
        for number, value in enumerate(values)
    ]


def some(cases: Iterable[Any], count: int) -> list[Any]:
    """Return cases, of which so many, evenly spread, are without a further mark; the others are slow."""
    params = [_param(case) for case in cases]
    chosen = {index * len(params) // count for index in range(count)}
    return [
        pytest.param(*one.values, marks=[*one.marks, *([] if index in chosen else [pytest.mark.slow])]) for index, one in enumerate(params)
    ]


def _param(case: Any) -> Any:
    return case if isinstance(case, _Params) else pytest.param(*(case if isinstance(case, tuple) else (case,)))
