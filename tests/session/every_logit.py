"""Sessions over the recording engine with the logits of several new tokens per slot."""

from __future__ import annotations

from typing import Any

from tests.helpers.recording import kv_config, recorded
from trt_kvcache import InferenceSession, KVLayout
from trt_kvcache.engine.decoder_profiles import decoder_profiles


def with_every_logit(
    *, slots: int = 3, limit: int = 16, width: int = 6, logits: int = 5, combined: bool = False, trees: bool = False, **options: Any
) -> InferenceSession:
    """Return a session; ``options`` are those of the session."""
    profiles = decoder_profiles(max_batch_size=slots, max_prefill_length=width, max_logits_per_slot=logits)
    layout = KVLayout.COMBINED if combined else KVLayout.SEPARATE
    kv = kv_config(slots=slots, limit=limit, layout=layout)
    return InferenceSession(*recorded(kv, profiles=profiles, more_logits=True, combined=combined, trees=trees), **options)
