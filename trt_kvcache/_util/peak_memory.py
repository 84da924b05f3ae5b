"""Peak memory of this process."""

from __future__ import annotations

import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_memory_nbytes() -> int | None:
    """Return the peak resident set of this process since its program started, in bytes; None where the system does not say.

    Linux: not from ``getrusage``, whose peak a new program inherits from the process that started it.
    """
    if _STATUS.is_file():
        peaks = [
            line.split()[1] for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines() if line.startswith("VmHWM:")
        ]
        return int(peaks[0]) << 10 if peaks else None
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10
