"""Check K: greedy tokens of the shipped model are those of the NumPy engine; with --full also logits after long prompts."""

from __future__ import annotations

from typing import Any

import numpy as np

from trt_kvcache.doctor.cases import CaseLog
from trt_kvcache.doctor.compare import TOLERANCES, check_close
from trt_kvcache.doctor.models import CheckedModel, shipped_model, wide_model
from trt_kvcache.doctor.settings import Settings
from trt_kvcache.doctor.subjects import SUBJECTS, Subject, case_name, open_reference
from trt_kvcache.doctor.tokens import check_greedy
from trt_kvcache.generation.chat_prompt import ChatPrompt
from trt_kvcache.session.session import InferenceSession

_TOKENS, _DRY_TOKENS = 100, 12
_QUESTION = "What is the capital of France?"
_LONG, _DRY_LONG = 1500, 100


def check(settings: Settings, log: CaseLog) -> None:
    """Generate with every engine."""
    model = shipped_model()
    for dtype in model.dtypes:
        with open_reference(model, dtype) as reference:
            for subject in SUBJECTS:
                name = case_name(subject.variant, model, dtype)
                log.run(name, lambda s=subject, d=dtype, r=reference: _generate(settings, s, model, d, r), variant=subject.variant)  # type: ignore[misc]
    if settings.full:
        _check_long_prompts(settings, log)


def _generate(settings: Settings, subject: Subject, model: CheckedModel, dtype: str, reference: InferenceSession) -> dict[str, Any]:
    count = _DRY_TOKENS if settings.dry_run else _TOKENS
    with subject.open(settings, model, dtype) as session:
        prompt = ChatPrompt([{"role": "user", "content": _QUESTION}])
        stream = session.generate(prompt, temperature=0.0, repetition_penalty=1.0, max_new_tokens=count, ignore_eos=True)
        tokens = [one.token for one in stream]
        held = [*session.tokens(0), *session.pending_tokens(0)]
        rate = session.statistics.decode_tokens_per_second
    prompt_ids = held[: len(held) - len(tokens)]
    ties = check_greedy("greedy tokens", [tokens], [prompt_ids], reference, TOLERANCES[dtype])
    return {"tokens": len(tokens), "ties": ties, "tokens_per_second": round(rate, 1)}


def _check_long_prompts(settings: Settings, log: CaseLog) -> None:
    """Compare the logits after a long prompt: sums in half precision would differ there."""
    model = wide_model(settings)
    length = _DRY_LONG if settings.dry_run else _LONG
    prompt = np.random.default_rng(8).integers(3, 500, length).tolist()
    for dtype in model.dtypes:
        with open_reference(model, dtype) as reference:
            expected = reference.prefill([prompt])
        for subject in SUBJECTS:

            def compare(subject: Subject = subject, dtype: str = dtype, expected: Any = expected) -> dict[str, Any]:
                with subject.open(settings, model, dtype) as session:
                    error = check_close(f"logits after {length} tokens", session.prefill([prompt]), expected, TOLERANCES[dtype])
                return {"relative_error": float(f"{error:.2g}")}

            log.run(f"{case_name(subject.variant, model, dtype)}, {length} tokens", compare, variant=subject.variant)
