"""Renames over files that a reader has open: Windows refuses them until the reader has closed the file, POSIX does not."""

import sys
import time
from collections.abc import Callable

#: Seconds between the attempts. Readers of this package hold a file while they read it, and close it.
PAUSES = (0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.4)


def until_closed(rename: Callable[[], object]) -> None:
    """Call ``rename``. On Windows, where it raises PermissionError, again for about a second."""
    pauses = iter(PAUSES if sys.platform == "win32" else ())
    while True:
        try:
            rename()
            return
        except PermissionError:
            pause = next(pauses, None)
            if pause is None:
                raise
        time.sleep(pause)
