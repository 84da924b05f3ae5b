"""Warnings that are reported at the place in the user's code that called the package."""

import sys
import warnings
from pathlib import Path

_PACKAGE = str(Path(__file__).resolve().parent.parent)


def warn_caller(message: str, category: type[Warning]) -> None:
    """Issue a warning at the innermost line outside this package."""
    # From Python 3.12 on, skip_file_prefixes of warnings.warn does this.
    frame, level = sys._getframe(1), 2  # 1 is this function
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
