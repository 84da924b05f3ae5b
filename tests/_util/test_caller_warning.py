"""Warnings point at the line of the user's code that called the package."""

import sys
import warnings
from types import ModuleType

import pytest

from trt_kvcache._util import caller_warning
from trt_kvcache._util.caller_warning import warn_caller


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A module that counts as a part of this package, and warns from two calls down."""
    monkeypatch.setattr(caller_warning, "_PACKAGE", str(tmp_path))
    code = "def outer(warn, *given):\n    inner(warn, *given)\n\ndef inner(warn, *given):\n    warn(*given)\n"
    module = ModuleType("part")
    exec(compile(code, str(tmp_path / "part.py"), "exec"), module.__dict__)
    return module


def test_the_line_is_that_of_the_caller(package):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = sys._getframe().f_lineno + 1
        package.outer(warn_caller, "slow", RuntimeWarning)
    (found,) = caught
    assert (found.filename, found.lineno) == (__file__, line)
    assert (found.category, str(found.message)) == (RuntimeWarning, "slow")


def test_a_call_from_outside_the_package_is_its_own_caller():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = sys._getframe().f_lineno + 1
        warn_caller("slow", UserWarning)
    assert (caught[0].filename, caught[0].lineno) == (__file__, line)
