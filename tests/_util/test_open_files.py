"""Files and folders are replaced although a reader has them open: on Windows once it has closed them."""

import os

import pytest

from trt_kvcache._util import atomic_folder as folders, open_files
from trt_kvcache._util.atomic_file import atomic_file
from trt_kvcache._util.atomic_folder import atomic_folder


@pytest.fixture
def windows(monkeypatch):
    """Refuse renames of a system whose reader closes the file after so many attempts; return the attempts."""
    attempts = []

    def install(name, closed_after):
        real = getattr(os, name)

        def rename(source, target):
            attempts.append((source, target))
            if len(attempts) <= closed_after:
                raise PermissionError(13, "The process cannot access the file because it is being used by another process", str(target))
            real(source, target)

        monkeypatch.setattr(os, name, rename)
        monkeypatch.setattr("sys.platform", "win32")
        monkeypatch.setattr(open_files, "PAUSES", (0.0,) * 3)
        return attempts

    return install


def replace(target, content):
    with atomic_file(target) as file:
        file.write(content)


@pytest.mark.parametrize("closed_after", [0, 1, 3])
def test_a_file_is_replaced_once_its_reader_has_closed_it(tmp_path, windows, closed_after):
    target = tmp_path / "data.bin"
    target.write_bytes(b"old")
    attempts = windows("replace", closed_after)
    replace(target, b"new")
    assert (target.read_bytes(), len(attempts), os.listdir(tmp_path)) == (b"new", closed_after + 1, ["data.bin"])


def test_a_file_that_stays_open_is_left_as_it_was(tmp_path, windows):
    target = tmp_path / "data.bin"
    target.write_bytes(b"old")
    windows("replace", 4)
    with pytest.raises(PermissionError, match=r"used by another process.*data\.bin"):
        replace(target, b"new")
    assert (target.read_bytes(), os.listdir(tmp_path)) == (b"old", ["data.bin"])


def test_elsewhere_a_refusal_is_final(tmp_path, windows, monkeypatch):
    attempts = windows("replace", 1)
    monkeypatch.setattr("sys.platform", "linux")
    with pytest.raises(PermissionError):
        replace(tmp_path / "data.bin", b"new")
    assert len(attempts) == 1


@pytest.mark.parametrize("closed_after", [0, 2])
def test_a_folder_is_replaced_once_its_reader_has_closed_its_files(tmp_path, windows, monkeypatch, closed_after):
    target = tmp_path / "engine"
    target.mkdir()
    (target / "old").touch()
    monkeypatch.setattr(folders, "_exchange", lambda first, second: False)
    windows("rename", closed_after)
    with atomic_folder(target) as folder:
        (folder / "new").touch()
    assert (os.listdir(target), os.listdir(tmp_path)) == (["new"], ["engine"])


def test_a_reader_on_this_system_does_not_matter(tmp_path):
    target = tmp_path / "data.bin"
    target.write_bytes(b"old")
    with target.open("rb") as reader:
        replace(target, b"new")
        assert (reader.read(), target.read_bytes()) == (b"old", b"new")
