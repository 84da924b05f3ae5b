"""Files from elsewhere: regular ones only, and no more of them than expected."""

import os
import socket
from pathlib import Path

import pytest

from trt_kvcache._util.regular_file import open_regular, read_regular


def test_a_file_is_read(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 100_000)
    assert read_regular(tmp_path / "a", 100_000) == b"x" * 100_000


def test_a_link_to_a_file_is_followed(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert read_regular(tmp_path / "b", 3) == b"abc"


def test_one_byte_too_many(tmp_path):
    (tmp_path / "a").write_bytes(b"abcd")
    with pytest.raises(OSError, match="expected at most 3 bytes, got 4"):
        read_regular(tmp_path / "a", 3)


def test_a_file_whose_size_is_not_known_is_limited_too():
    with pytest.raises(OSError, match="expected at most 10 bytes, got more"):
        read_regular(Path("/proc/self/status"), 10)
    assert b"Name:" in read_regular(Path("/proc/self/status"), 1 << 20)


def test_nothing_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "nowhere")


@pytest.mark.parametrize("kind", ["a folder", "a named pipe", "a device", "a socket"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, kind):
    path = tmp_path / "a"
    if kind == "a folder":
        path.mkdir()
    elif kind == "a named pipe":
        os.mkfifo(path)  # opening it would wait for a writer
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        server = socket.socket(socket.AF_UNIX)
        server.bind(os.path.relpath(path) if len(str(path)) > 100 else str(path))
        server.close()
    with pytest.raises(OSError, match=f"expected a regular file, got {kind}" if kind != "a socket" else "No such device"):
        open_regular(path)


def test_no_descriptor_is_left_open(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(OSError, match="a named pipe"):
            open_regular(tmp_path / "pipe")
    assert len(os.listdir("/proc/self/fd")) == before
