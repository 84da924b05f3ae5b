"""The most memory that a process has had since a moment: what it had before that does not hide how much it needs."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from trt_kvcache._util.peak_memory import peak_memory_nbytes

#: How much more of TensorRT's libraries a system may map at once, in bytes. Seen: 38 MB, where they had just been installed.
MAPPED_MORE = 48 << 20


def begin_peak() -> int:
    """Forget the peak of this process so far, where the system can (Linux), and return the new one, in bytes."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak_memory_nbytes() or 0


def peak_growth(before: int) -> int:
    """Return how much higher the peak is than ``begin_peak`` said, in bytes."""
    return (peak_memory_nbytes() or 0) - before
