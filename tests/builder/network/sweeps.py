"""Tests that go over every case with every value: one value of each case for each change, all of them in ``make test-all``."""

import pytest


def each_once(cases, values):
    """Return parameters: each case, a tuple, with each value. One value a case is left unmarked, in turns; the others are slow."""
    return [
        pytest.param(*case, value, marks=[] if number == index % len(values) else pytest.mark.slow)
        for index, case in enumerate(cases)
        for number, value in enumerate(values)
    ]
