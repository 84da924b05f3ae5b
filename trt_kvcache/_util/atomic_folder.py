"""Writing a folder so that it appears under its name only when it is complete."""

import ctypes
import os
import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trt_kvcache._util.atomic_file import error_about
from trt_kvcache._util.open_files import until_closed

# Arguments of renameat2 in Linux.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes ``target`` when the block ends; on Linux in one step, so that a kill leaves one of the two whole.

    If the block raises, it is removed, and a folder that was there before is unchanged. A link is followed, and stays.
    """
    given, target = target, Path(os.path.realpath(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = _sibling(target, "new")
    try:
        temporary.mkdir()
        yield temporary
        _replace(temporary, target)
    except OSError as error:
        raise error_about(given, error, temporary) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace(folder: Path, target: Path) -> None:
    """Rename a folder to ``target``, and remove the folder of that name."""
    if not target.exists():
        try:
            os.rename(folder, target)
            return
        except OSError:  # another process was faster
            if not target.exists():
                raise
    if _exchange(folder, target):
        shutil.rmtree(folder, ignore_errors=True)
        return
    old = _sibling(target, "old")
    until_closed(lambda: os.rename(target, old))
    try:
        until_closed(lambda: os.rename(folder, target))
    except BaseException:
        os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange the names of two folders in one step. Return False if the system cannot."""
    if sys.platform != "linux":
        return False
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):  # a C library without it
        return False
    return bool(renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0)


def _sibling(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.{what}")
