"""A file that is written appears complete or not at all."""

import os

import pytest

from trt_kvcache._util.atomic_file import atomic_file


@pytest.fixture
def target(tmp_path):
    return tmp_path / "data.bin"


def write(target, content, error=None):
    """Write a file; with an error, fail after the last byte."""
    with atomic_file(target) as file:
        file.write(content)
        if error is not None:
            raise error


def test_the_bytes_are_there_afterwards(target):
    write(target, b"new")
    assert target.read_bytes() == b"new"


def test_nothing_is_there_before_the_block_ends(target):
    with atomic_file(target) as file:
        file.write(b"new")
        file.flush()
        assert not target.exists()


def test_a_file_that_is_there_is_replaced(target):
    target.write_bytes(b"old and longer")
    write(target, b"new")
    assert target.read_bytes() == b"new"


def test_no_other_file_is_left(target):
    write(target, b"new")
    assert os.listdir(target.parent) == ["data.bin"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_inside_leaves_the_old_file(target, error):
    target.write_bytes(b"old")
    with pytest.raises(error):
        write(target, b"new", error)
    assert (os.listdir(target.parent), target.read_bytes()) == (["data.bin"], b"old")


def test_an_error_inside_leaves_nothing_where_nothing_was(target):
    with pytest.raises(OSError, match="no disk"):
        write(target, b"new", OSError("no disk"))
    assert os.listdir(target.parent) == []


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_of_the_disk_leaves_the_old_file(target, monkeypatch, step):
    def fail(*_):
        raise OSError("no space left")

    target.write_bytes(b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with pytest.raises(OSError, match="no space left"):
            write(target, b"new")
    assert (os.listdir(target.parent), target.read_bytes()) == (["data.bin"], b"old")


def test_bytes_reach_the_disk_before_the_file_gets_its_name(target, monkeypatch):
    steps, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda *arguments: (steps.append("fsync"), fsync(*arguments)))
    monkeypatch.setattr(os, "replace", lambda *arguments: (steps.append("replace"), replace(*arguments)))
    write(target, b"new")
    assert steps == ["fsync", "replace"]


def test_two_writers_do_not_meet(target):
    with atomic_file(target) as one, atomic_file(target) as other:
        one.write(b"one")
        other.write(b"other")
    assert target.read_bytes() == b"one"  # whose block ended last


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(IsADirectoryError, match=str(tmp_path)), atomic_file(tmp_path):
        pass
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_missing_is_not_made(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_file(tmp_path / "missing" / "data.bin"):
        pass
    assert os.listdir(tmp_path) == []
