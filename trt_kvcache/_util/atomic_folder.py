"""Writing a folder so that it appears under its name only when it is complete."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes ``target`` when the block ends.

    The folder is made beside ``target`` under another name. If ``target`` exists, it is replaced at the end. If the block raises,
    the new folder is removed and the old one is as it was.

    Parameters
    ----------
    target : Path
        Where the folder is to be. Its parents are made.

    Yields
    ------
    Path
        The folder to fill.

    Raises
    ------
    OSError
        No folder can be made there.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = _sibling(target, "new")
    temporary.mkdir()
    try:
        yield temporary
        _replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace(folder: Path, target: Path) -> None:
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
