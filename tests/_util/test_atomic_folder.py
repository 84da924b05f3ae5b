"""A folder appears complete or not at all, and what was in its place stays until then."""

import os

import pytest

from trt_kvcache._util.atomic_folder import atomic_folder


@pytest.fixture
def target(tmp_path):
    """A folder with one file, alone in its parent."""
    folder = tmp_path / "place" / "target"
    folder.mkdir(parents=True)
    (folder / "old.txt").write_text("old")
    return folder


def names_in(folder):
    return sorted(os.listdir(folder))


def test_a_new_folder_appears_when_the_block_ends(tmp_path):
    target = tmp_path / "a" / "b" / "target"
    with atomic_folder(target) as folder:
        (folder / "new.txt").write_text("new")
        assert not target.exists()
    assert names_in(target) == ["new.txt"]
    assert names_in(target.parent) == ["target"]


def test_a_folder_that_exists_is_replaced(target):
    with atomic_folder(target) as folder:
        (folder / "new.txt").write_text("new")
        assert names_in(target) == ["old.txt"]
    assert names_in(target) == ["new.txt"]
    assert names_in(target.parent) == ["target"]


def test_a_block_that_raises_leaves_the_old_folder_and_nothing_else(target):
    with pytest.raises(FileNotFoundError), atomic_folder(target) as folder:
        (folder / "nowhere" / "new.txt").write_text("new")
    assert names_in(target) == ["old.txt"]
    assert names_in(target.parent) == ["target"]


def test_the_old_folder_is_put_back_if_the_new_one_cannot_take_its_place(target, monkeypatch):
    rename = os.rename

    def refuse_the_new_folder(source, destination):
        if str(source).endswith(".new"):
            raise OSError(28, "No space left on device")
        rename(source, destination)

    monkeypatch.setattr(os, "rename", refuse_the_new_folder)
    with pytest.raises(OSError, match="No space left on device"), atomic_folder(target) as folder:
        (folder / "new.txt").write_text("new")
    assert names_in(target) == ["old.txt"]
    assert names_in(target.parent) == ["target"]
