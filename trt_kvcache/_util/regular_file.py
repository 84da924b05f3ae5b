"""Opening untrusted files: only regular files, and never more bytes than expected."""

import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading, unbuffered. Links are followed; a folder, pipe or device is an OSError at once."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOCTTY", 0)
    descriptor = os.open(path, flags)
    try:
        mode = os.fstat(descriptor).st_mode  # of the open descriptor: the file of a name can be exchanged
        if not stat.S_ISREG(mode):
            kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
            raise OSError(f"expected a regular file, got {kind}")
        return os.fdopen(descriptor, "rb", buffering=0)
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, limit: int) -> bytes:
    """Return the bytes of a regular file; more than ``limit`` bytes are an OSError."""
    with open_regular(path) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > limit:
            raise OSError(f"expected at most {limit} bytes, got {nbytes}")
        content = file.read(limit + 1)  # a file of /proc has a size of 0
        while len(content) <= limit and (more := file.read(limit + 1 - len(content))):
            content += more
    if len(content) > limit:
        raise OSError(f"expected at most {limit} bytes, got more")
    return content
