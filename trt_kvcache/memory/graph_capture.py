"""``refuse_capture``: a ``CaptureError`` for calls that a CUDA graph cannot capture."""

from typing import Any

from trt_kvcache.errors import CaptureError
from trt_kvcache.memory.base import Memory

_FROZEN = "its host values would be frozen into the CUDA graph"


def refuse_capture(memory: Memory, what: str, stream: Any, *, because: str = _FROZEN) -> None:
    """Raise ``CaptureError`` if a stream is capturing, and ``PlaceError`` if it is not of this memory."""
    if memory.is_capturing(stream):
        raise CaptureError(
            f"{what} cannot be captured: {because}. Capture commits of a number or a device tensor, and compactions with a device "
            "mapping. Nothing was changed."
        )
