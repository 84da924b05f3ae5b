"""A lock between processes, held by a file next to the protected one."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold a lock while the block runs; waits for a process that has it. The file stays: removing it would let two processes in."""
    with path.open("ab") as file:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)  # freed as the file is closed; untried
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield
