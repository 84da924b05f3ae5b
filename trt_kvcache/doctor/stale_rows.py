"""Rows of K and V that are not live: finite values in them must not change logits. NaN may, with ``native`` and ``mask`` only."""

from __future__ import annotations

from typing import Any

from trt_kvcache.cache.layout import KVLayout
from trt_kvcache.doctor.cases import CaseLog, CheckFailure
from trt_kvcache.doctor.compare import TOLERANCES, Array, check_close
from trt_kvcache.doctor.models import CheckedModel
from trt_kvcache.doctor.settings import Settings
from trt_kvcache.doctor.subjects import SUBJECTS, Subject, case_name
from trt_kvcache.session.session import InferenceSession

#: Large but finite, as what a request left whose values overflowed nearly.
LARGE = 1e4

_PROMPTS = [[3, 9, 17, 5, 33, 21, 8], [4, 41, 7], [5, 12, 99, 45, 3]]


def check_stale_rows(settings: Settings, log: CaseLog, model: CheckedModel, dtype: str, reference: InferenceSession) -> None:
    """Check every engine with large values in rows that are not live, then with NaN.

    NaN may reach the results of TensorRT's own attention, which multiplies rows that are not live by 0. That is noted, not a failure.
    """
    expected = _steps(reference, None)
    for subject in SUBJECTS:
        for value, text in ((LARGE, f"{LARGE:g}"), (float("nan"), "NaN")):
            name = f"{case_name(subject.variant, model, dtype)}, {text} in rows that are not live"

            def compare(subject: Subject = subject, value: float = value) -> dict[str, Any]:
                with subject.open(settings, model, dtype) as session:
                    found = _steps(session, value)
                errors = [
                    check_close(f"step {index}", *pair, TOLERANCES[dtype]) for index, pair in enumerate(zip(found, expected, strict=True))
                ]
                return {"worst_relative_error": float(f"{max(errors):.2g}")}

            def note(subject: Subject = subject, name: str = name) -> dict[str, Any]:
                try:
                    return compare(subject, float("nan"))
                except CheckFailure as reached:
                    log.note(f"{name}: it reaches results", str(reached))
                    return {"nan_reaches_results": True}

            decides = value == LARGE or subject.variant not in ("native", "mask")
            log.run(name, compare if decides else note, variant=subject.variant)


def _steps(session: InferenceSession, value: float | None) -> list[Array]:
    """Return the logits of decode and of a second turn, after rows that are not live were overwritten."""
    session.prefill(_PROMPTS)
    if value is not None:
        fill_dead_rows(session, value)
    return [session.decode([11, 23, 4]), session.append([[8, 15], [77], [50, 3, 9]])]


def fill_dead_rows(session: InferenceSession, value: float) -> None:
    """Overwrite every row of K and V beyond the live ones."""
    cache, kv = session.cache, session.cache_config.kv
    assert kv is not None
    stream = cache.memory.create_stream()
    for layer in range(kv.num_layers):
        for view in (cache.get_combined_kv_cache(layer),) if kv.layout is KVLayout.COMBINED else cache.get_separate_kv_cache(layer):
            rows = view.numpy()
            for slot in range(view.shape[0]):
                live = cache.host_kv_cache_lengths[slot] if slot < cache.active_batch_size else 0
                rows[slot, ..., live:, :] = value
            cache.memory.upload(view, rows, stream=stream)
            cache.memory.synchronize(stream)
