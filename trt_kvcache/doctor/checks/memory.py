"""Check J: memory of a session, and that repeated decode steps allocate nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from trt_kvcache.benchmarking.memory_use import free_and_total
from trt_kvcache.doctor.cases import CaseLog, CheckFailure
from trt_kvcache.doctor.models import CheckedModel, own_model, wide_model
from trt_kvcache.doctor.settings import Settings
from trt_kvcache.doctor.subjects import SUBJECTS, Subject, case_name
from trt_kvcache.memory.base import Memory

_STEPS, _ROUNDS = 20, 3  # a dry run takes few steps


def check(settings: Settings, log: CaseLog) -> None:
    """Measure the memory of every engine."""
    for model in filter(None, (wide_model(settings), own_model(settings))):
        dtype = model.dtypes[0]
        for subject in SUBJECTS:
            name = case_name(subject.variant, model, dtype)
            log.run(name, lambda s=subject, m=model, d=dtype: memory_of(settings, s, m, d), variant=subject.variant)  # type: ignore[misc]


def memory_of(settings: Settings, subject: Subject, model: CheckedModel, dtype: str) -> dict[str, Any]:
    """Return the MiB that opening and the first steps take; fail if every round of decode steps takes more."""
    before = _used_nbytes(settings.memory())
    with subject.open(settings, model, dtype) as session:
        memory = session.cache.memory
        opened = _used_nbytes(memory)
        tokens = session.prefill([[3, 4, 5]] * model.slots).argmax(axis=1).tolist()
        prefilled = _used_nbytes(memory)
        for _ in range(5):  # the third may be captured
            tokens = session.decode(tokens).argmax(axis=1).tolist()
        growth = []
        for _ in range(_ROUNDS):
            at_start = _used_nbytes(memory)
            for _ in range(2 if settings.dry_run else _STEPS):
                tokens = session.decode(tokens).argmax(axis=1).tolist()
            growth.append(_used_nbytes(memory) - at_start)
    # Other processes use the device too, so a single round may see more.
    on_device, own = np.min(growth, axis=0).tolist()
    if on_device > 0 or own > 0:
        raise CheckFailure(
            f"{_STEPS} decode steps: expected no allocation, got at least {on_device} bytes more on the device, and {own} in allocations "
            f"of this package, in each of {_ROUNDS} rounds"
        )
    figures = {"open": opened - before, "first_prefill": prefilled - opened}
    return {f"{name}_mib": round(int(used[0]) / (1 << 20), 1) for name, used in figures.items()} | {"cache_mib": session.cache.nbytes >> 20}


def _used_nbytes(memory: Memory) -> np.ndarray[Any, Any]:
    """Return the bytes in use on the device by all processes (0 in host memory), and those of this package's allocations."""
    if memory.is_host:
        return np.array([0, memory.live_nbytes])
    free, total = free_and_total(memory)
    return np.array([total - free, memory.live_nbytes])
