"""Make a folder that appears complete or not at all."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``target``, which takes its place when the block ends.

    A folder that is there is replaced then. If the block raises, nothing is left of the new one, and the old one is as it
    was.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = _sibling(target, "new")
    temporary.mkdir()
    try:
        yield temporary
        _put_in_place(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _put_in_place(folder: Path, target: Path) -> None:
    if not target.exists():
        os.rename(folder, target)
        return
    old = _sibling(target, "old")
    os.rename(target, old)
    try:
        os.rename(folder, target)
    except BaseException:
        os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _sibling(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.{what}")
