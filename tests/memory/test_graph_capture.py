"""What cannot be captured in a CUDA graph says so, before it does anything."""

import pytest

from tests.helpers.caches import CapturingMemory
from trt_kvcache.errors import CaptureError, PlaceError
from trt_kvcache.memory.graph_capture import refuse_capture


@pytest.fixture
def capturing():
    return CapturingMemory()


def test_a_stream_that_is_not_captured_passes(memory, stream):
    refuse_capture(memory, "reset", stream)


def test_while_a_stream_is_captured(capturing):
    stream = capturing.create_stream()
    capturing.capturing = True
    with pytest.raises(CaptureError) as caught:
        refuse_capture(capturing, "reset", stream)
    assert str(caught.value) == (
        "reset cannot be captured: its host values would be frozen into the CUDA graph. Capture commits of a number or a device "
        "tensor, and compactions with a device mapping. Nothing was changed."
    )


def test_for_another_reason(capturing):
    stream = capturing.create_stream()
    capturing.capturing = True
    with pytest.raises(CaptureError, match=r"^sync cannot be captured: it waits\. Capture commits"):
        refuse_capture(capturing, "sync", stream, because="it waits")


def test_what_is_no_stream_of_the_memory(memory):
    with pytest.raises(PlaceError, match=r"^stream: expected .*, got NoneType\.$"):
        refuse_capture(memory, "reset", None)
