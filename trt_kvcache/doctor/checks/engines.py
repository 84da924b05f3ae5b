"""Check C: TensorRT builds engines with each attention variant, and opens them with the tensors and profiles of the build."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from trt_kvcache.doctor.cases import VARIANTS, CaseLog, NotHere
from trt_kvcache.doctor.models import CheckedModel, own_model, shipped_model, short_model, tiny_model, wide_model
from trt_kvcache.doctor.settings import Settings
from trt_kvcache.doctor.subjects import TENSORRT, Subject, case_name, engine_folder, usable_tensorrt, variant_reason
from trt_kvcache.engine_folder.folder import EngineFolder
from trt_kvcache.errors import EngineError

#: TensorRT's words where it does not support the GPU.
_NO_SUPPORT = "TensorRT does not support this GPU"
_REFUSED_GPU = re.compile(r"compute capabilit", re.IGNORECASE)


def check(settings: Settings, log: CaseLog) -> None:
    """Build and open the engines of all later checks."""
    try:
        tensorrt = usable_tensorrt(settings)
    except NotHere as reason:
        log.not_here(TENSORRT, str(reason))
        return
    log.run(TENSORRT, lambda: {"tensorrt": str(tensorrt)})
    models = (wide_model(settings), short_model(settings), shipped_model(), tiny_model(settings), own_model(settings))
    for model in filter(None, models):
        for dtype in model.dtypes:
            for variant in VARIANTS:
                name = case_name(variant, model, dtype)
                log.run(name, lambda m=model, d=dtype, v=variant: _build_and_open(settings, m, d, v), variant=variant)  # type: ignore[misc]
                if any(case.text.startswith(_NO_SUPPORT) for case in log.cases):  # the other engines would get the same answer
                    log.not_here(TENSORRT, log.cases[-1].text)
                    return


def _build_and_open(settings: Settings, model: CheckedModel, dtype: str, variant: str) -> dict[str, Any]:
    """Build an engine and open it; opening compares its tensors, aliases and profiles with those of the build."""
    reason = variant_reason(usable_tensorrt(settings), variant, model, dtype)
    if reason is not None:
        raise NotHere(reason)
    started = time.perf_counter()
    folder = Path(engine_folder(settings, model, dtype, variant))
    built = time.perf_counter()
    figures = {"build_seconds": round(built - started, 2), **_figures(folder)}
    try:
        with Subject("tensorrt", variant).open(settings, model, dtype) as session:
            profiles = [profile.name for profile in session.engine.profiles]
    except EngineError as error:
        if _REFUSED_GPU.search(str(error)):
            raise NotHere(f"{_NO_SUPPORT}: {error}") from None
        raise
    if settings.dry_run:
        return {**figures, "opened": "by the NumPy engine (dry run)"}
    return {**figures, "open_seconds": round(time.perf_counter() - built, 2), "profiles": profiles}


def _figures(folder: Path) -> dict[str, Any]:
    config = EngineFolder.open(folder).config
    segments = {} if config.segments is None else {"segments": len(config.segments.plans)}
    return {"plan_nbytes": config.plan.nbytes, **segments}
