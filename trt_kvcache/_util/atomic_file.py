"""Writing a file so that it appears under its name only when it is complete."""

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from trt_kvcache._util.open_files import until_closed


def check_target(target: Path) -> None:
    """Raise an OSError if ``target`` cannot be created, before the work whose result it will hold."""
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    parent = target.absolute().parent
    if not parent.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(parent))
    if not parent.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(parent))
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(parent))


def error_about(target: Path, error: OSError, temporary: Path) -> OSError:
    """Return an error that names ``target`` if ``error`` names no file (a full disk) or the temporary one, which no user knows."""
    if error.errno is None or error.filename not in (None, str(temporary), temporary):
        return error
    return OSError(error.errno, error.strerror, str(target))


@contextmanager
def atomic_file(target: Path) -> Iterator[BinaryIO]:
    """Yield an empty file that becomes ``target`` when the block ends and its bytes are on disk.

    If the block raises, it is removed, and a file that was there before is unchanged.
    """
    check_target(target)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.new")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        until_closed(lambda: os.replace(temporary, target))
    except OSError as error:
        raise error_about(target, error, temporary) from error
    finally:
        temporary.unlink(missing_ok=True)
