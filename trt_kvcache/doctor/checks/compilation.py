"""Check H: seconds of compilation at run time: for a first step, for a new shape, and in a second process."""

from __future__ import annotations

from dataclasses import replace

from trt_kvcache.doctor.cases import CaseLog
from trt_kvcache.doctor.catalog import Check
from trt_kvcache.doctor.processes import run_in_child
from trt_kvcache.doctor.settings import Settings

_LIMIT_SECONDS = 450


def check(settings: Settings, log: CaseLog) -> None:
    """Run the first steps in two processes with one cache folder, which is empty before."""
    cache = settings.folder / "cache-of-compilation"
    for number in ("first", "second"):
        steps = Check("H", f"{number} process", "trt_kvcache.doctor.checks.first_steps", _LIMIT_SECONDS)
        result = run_in_child(steps, settings, environment={"XDG_CACHE_HOME": str(cache)}, own_group=False)
        for case in result.cases:
            log.add(replace(case, name=f"{number} process: {case.name}"))
        nbytes = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
        log.note(f"cache after the {number} process", f"{nbytes} bytes", nbytes=nbytes)
