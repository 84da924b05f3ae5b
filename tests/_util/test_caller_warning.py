"""``warn_caller``: a warning points at the line outside the package, however deep the call is."""

from __future__ import annotations

import sys
import warnings

import pytest

from trt_kvcache._util import caller_warning
from trt_kvcache._util.caller_warning import warn_caller


def caught(call):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [(one.filename, one.lineno, str(one.message), one.category) for one in found]


def inside_the_package(depth):
    """Return a function that warns ``depth`` calls deep in a file of the package."""
    space = {"warn_caller": warn_caller}
    source = "def call(depth):\n    call(depth - 1) if depth else warn_caller('look', UserWarning)\n"
    exec(compile(source, f"{caller_warning._PACKAGE}/session/made_up.py", "exec"), space)
    return lambda: space["call"](depth)


@pytest.mark.parametrize("depth", [0, 1, 7])
def test_it_points_at_the_line_that_called_the_package(depth):
    call = inside_the_package(depth)
    line = inside_the_package.__code__.co_firstlineno + 5  # the lambda
    assert caught(call) == [(__file__, line, "look", UserWarning)]


def test_called_directly_it_points_at_that_line():
    line = sys._getframe().f_lineno + 1
    assert caught(lambda: warn_caller("look", DeprecationWarning)) == [(__file__, line, "look", DeprecationWarning)]
