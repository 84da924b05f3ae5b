"""Sessions in host memory that choose tokens as on a device: with the NumPy twins of the kernels, one step ahead."""

from __future__ import annotations

from trt_kvcache import InferenceSession


def ahead(session: InferenceSession) -> InferenceSession:
    """Let a session choose its tokens where the logits are, and return it."""
    assert session._decode_steps.can_be_on_device
    session._decode_steps.on_device = True
    return session
