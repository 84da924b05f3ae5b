"""Tests that go over every case with every value: a part of them for each change, all of them in ``make test-all``."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

_Params = type(pytest.param())


def one_of_each_family(names: Iterable[str]) -> list[Any]:
    """Return names of golden models, ``family`` or ``family-configuration``. The first of each family is unmarked; the others are slow."""
    seen: set[str] = set()
    found = []
    for name in names:
        family = name.partition("-")[0]
        found.append(pytest.param(name, marks=pytest.mark.slow if family in seen else []))
        seen.add(family)
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


def _param(case: Any) -> Any:
    return case if isinstance(case, _Params) else pytest.param(*(case if isinstance(case, tuple) else (case,)))
