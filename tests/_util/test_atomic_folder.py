"""A folder that is made appears complete or not at all."""

import os
import sys

import pytest

from trt_kvcache._util import atomic_folder as atomic_folder_module
from trt_kvcache._util.atomic_folder import atomic_folder


@pytest.fixture
def target(tmp_path):
    return tmp_path / "engine"


def make(target, *names, error=None):
    """Make a folder of files; with an error, fail after the last one."""
    with atomic_folder(target) as folder:
        for name in names:
            (folder / name).write_text(name)
        if error is not None:
            raise error


def held(target):
    return sorted(os.listdir(target))


def test_the_files_are_there_afterwards(target):
    make(target, "a", "b")
    assert held(target) == ["a", "b"]


def test_nothing_is_there_before_the_block_ends(target):
    with atomic_folder(target) as folder:
        (folder / "a").write_text("a")
        assert not target.exists()


def test_the_folders_above_are_made(tmp_path):
    make(tmp_path / "one" / "two" / "engine", "a")
    assert held(tmp_path / "one" / "two" / "engine") == ["a"]


def test_a_folder_that_is_there_is_replaced_whole(target):
    make(target, "old")
    make(target, "new")
    assert held(target) == ["new"]


def test_no_other_folder_is_left(target):
    make(target, "old")
    make(target, "new")
    assert os.listdir(target.parent) == ["engine"]


@pytest.mark.parametrize("exchange", [True, False], ids=["in one step", "in two steps"])
def test_a_folder_that_is_there_is_replaced_by_either_way(target, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(atomic_folder_module, "_exchange", lambda *_: False)
    make(target, "old")
    make(target, "new")
    assert (os.listdir(target.parent), held(target)) == (["engine"], ["new"])


@pytest.mark.skipif(sys.platform != "linux", reason="other systems need two steps")
def test_a_whole_folder_is_there_at_every_moment(target, monkeypatch):
    make(target, "old")
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, lambda *_: pytest.fail("a step in which nothing is there"))
    make(target, "new")
    assert held(target) == ["new"]


def test_another_process_may_be_faster(target):
    with atomic_folder(target) as folder:
        (folder / "slow").touch()
        make(target, "fast")
    assert (os.listdir(target.parent), held(target)) == (["engine"], ["slow"])


@pytest.mark.parametrize("exists", [True, False], ids=["a folder", "nothing yet"])
@pytest.mark.parametrize("steps", [1, 2], ids=["a link", "a link to a link"])
@pytest.mark.parametrize("relative", [True, False], ids=["relative", "absolute"])
def test_a_link_is_followed_and_stays(tmp_path, exists, steps, relative):
    target = tmp_path / "disk" / "engine"
    if exists:
        make(target, "old")
    (tmp_path / "links").mkdir()
    leads_to = "../disk/engine" if relative else target
    for step in range(steps):
        link = tmp_path / "links" / f"link{step}"
        link.symlink_to(leads_to)
        leads_to = link.name if relative else link
    make(link, "new")
    assert (held(target), os.listdir(target.parent)) == (["new"], ["engine"])
    assert held(tmp_path / "links") == ["link0", "link1"][:steps]
    assert link.is_symlink()


def test_a_link_to_itself_is_an_error_that_names_it(target):
    target.symlink_to(target.name)
    with pytest.raises(OSError, match="engine"):
        make(target, "new")
    assert (os.listdir(target.parent), target.is_symlink()) == (["engine"], True)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_inside_leaves_the_old_folder(target, error):
    make(target, "old")
    with pytest.raises(error):
        make(target, "new", error=error)
    assert (os.listdir(target.parent), held(target)) == (["engine"], ["old"])


def test_an_error_inside_leaves_nothing_where_nothing_was(target):
    with pytest.raises(ZeroDivisionError), atomic_folder(target):
        _ = 1 / 0
    assert os.listdir(target.parent) == []


def test_where_the_new_folder_gets_no_name_the_old_one_comes_back(target, monkeypatch):
    monkeypatch.setattr(atomic_folder_module, "_exchange", lambda *_: False)  # as where the system cannot do it in one step
    make(target, "old")
    rename, calls = os.rename, []

    def fail_second(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise PermissionError("in use")
        rename(*arguments)

    monkeypatch.setattr(os, "rename", fail_second)
    with pytest.raises(PermissionError, match="in use"):
        make(target, "new")
    assert (os.listdir(target.parent), held(target)) == (["engine"], ["old"])


def test_two_writers_do_not_meet(target):
    with atomic_folder(target) as one, atomic_folder(target) as other:
        (one / "one").write_text("")
        (other / "other").write_text("")
    assert held(target) == ["one"]  # whose block ended last
