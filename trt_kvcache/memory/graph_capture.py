"""Refusing calls that cannot be captured in a CUDA graph, with ``CaptureError``."""

from typing import Any

from trt_kvcache.errors import CaptureError
from trt_kvcache.memory.base import Memory

_FROZEN = "its host values would be frozen into the CUDA graph"


def refuse_capture(memory: Memory, what: str, stream: Any, *, because: str = _FROZEN) -> None:
    """Check that a stream is not capturing, before an operation that a CUDA graph cannot hold."""
    memory.check_stream(stream)
    if memory.is_capturing(stream):
        raise CaptureError(
            f"{what} cannot be captured: {because}. Capture commits of a number or a device tensor, and compactions with a device "
            "mapping. Nothing was changed."
        )
