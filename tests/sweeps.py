"""Tests that go over every case with every value: one value of each case for each change, all of them in ``make test-all``."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def each_once(cases: Iterable[Any], values: Sequence[Any]) -> list[Any]:
    """Return each case, a name or a tuple, with each value. One value a case is unmarked, in turns; the others are slow."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), value, marks=[] if number == index % len(values) else pytest.mark.slow
        )
        for index, case in enumerate(cases)
        for number, value in enumerate(values)
    ]
