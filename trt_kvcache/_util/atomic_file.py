"""Write a file that appears complete or not at all."""

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_file(target: Path) -> Iterator[BinaryIO]:
    """Yield an empty file beside ``target``, which takes its place when the block ends and the bytes are on disk.

    A file that is there is replaced then. If the block raises, nothing is left of the new one, and the old one is as it was.
    Raises OSError where no file can be written, or ``target`` is a folder.
    """
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.new")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
