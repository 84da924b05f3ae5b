"""Snapshots that a session reads before it resumes them. What it does with them: test_session_reuse.py."""

import pytest

from tests.helpers.cache_cases import Unchanged
from tests.helpers.snapshot_cases import MODEL, TOKENS, host_cache, save
from trt_kvcache.errors import ShapeError
from trt_kvcache.session.resume_snapshots import read_snapshots


@pytest.fixture
def cache():
    with host_cache("manager", 5) as cache:
        yield cache


@pytest.fixture
def path(tmp_path, cache):
    save(tmp_path / "a", cache)
    return tmp_path / "a"


def test_paths_of_both_kinds(path, cache):
    assert [one.tokens for one in read_snapshots((path, str(path)), cache, MODEL)] == [tuple(TOKENS)] * 2


@pytest.mark.parametrize(
    "given",
    [lambda path: None, lambda path: 3, lambda path: b"a", lambda path: [], lambda path: [path, 3], lambda path: [path] * 6],
    ids=["None", "a number", "bytes", "nothing", "a number among them", "more than slots"],
)
def test_what_are_no_paths(path, cache, given):
    with Unchanged(cache), pytest.raises(ShapeError):
        read_snapshots(given(path), cache, MODEL)
