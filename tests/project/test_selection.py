"""``--part K/N``: the parts of a long run are all of its tests, each once. ``--each-value``: each value of each parameter, in few tests."""

from __future__ import annotations

import itertools
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.paths import ROOT
from tests.selection import _each_value, _part

SIZES, FLAGS, NAMES = [8, 64, 4096], [[0], [0, 1]], ["a", "b", "c", "d"]


def item(test, **params):
    name = f"{test}[{'-'.join(map(str, params.values()))}]" if params else test
    return SimpleNamespace(nodeid=f"tests/test_them.py::{name}", **({"callspec": SimpleNamespace(params=params)} if params else {}))


@pytest.fixture
def items():
    items = [item("test_of_three", size=size, flag=flag, name=name) for size, flag, name in itertools.product(SIZES, FLAGS, NAMES)]
    return [*items, *(item("TestOne::test_of_one", x=x) for x in range(6)), item("test_alone")]


def test_each_test_is_in_one_part(items):
    parts = [_part(f"{part}/3", items) for part in (1, 2, 3)]
    assert all(parts)
    assert sorted(one.nodeid for one in itertools.chain(*parts)) == sorted(one.nodeid for one in items)


def test_a_part_that_is_none_is_refused(items):
    with pytest.raises(pytest.UsageError, match="expected K/N with K from 1 to N, got 4/3"):
        _part("4/3", items)


def test_each_value_of_each_parameter_is_in_one_of_few_combinations(items):
    chosen = _each_value(items)
    assert chosen == [one for one in items if one in chosen]  # in their order
    of_three = [one.callspec.params for one in chosen if "test_of_three" in one.nodeid]
    assert 4 <= len(of_three) <= 4 + 2 + 3 - 2
    for name, values in (("size", SIZES), ("flag", FLAGS), ("name", NAMES)):
        assert all(value in [params[name] for params in of_three] for value in values)
    assert [one.nodeid for one in chosen if "test_of_three" not in one.nodeid] == [one.nodeid for one in items[-7:]]


def test_marks_are_looked_at_first(tmp_path):
    """Or a value whose only chosen combination has a mark would not run."""
    file = tmp_path / "test_them.py"
    file.write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('size', [0, 1, *(pytest.param(x, marks=pytest.mark.slow) for x in range(2, 9))])\n"
        "@pytest.mark.parametrize('name', ['a', 'b', 'c', 'd'])\n"
        "def test_them(name, size): ...\n"
    )
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-p", "tests.conftest"]
    command += ["-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, file, "--each-value", "-m", "not slow"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    names = [line.rpartition("[")[2].rstrip("]") for line in found.splitlines() if "[" in line]
    assert {name[0] for name in names} == {"a", "b", "c", "d"}
    assert {name[-1] for name in names} == {"0", "1"}
    assert len(names) < 8
