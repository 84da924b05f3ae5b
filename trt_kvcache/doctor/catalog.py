"""The checks, in their order."""

from __future__ import annotations

from typing import NamedTuple


class Check(NamedTuple):
    """One check. Its module has a function ``check(settings, log)``."""

    letter: str
    title: str
    module: str  # its full name
    limit_seconds: float  # then its process is ended: several times what a slow machine needs, so that only a hang takes longer


def _check(letter: str, title: str, module: str, limit_seconds: float) -> Check:
    return Check(letter, title, f"trt_kvcache.doctor.checks.{module}", limit_seconds)


CHECKS = (
    _check("A", "environment", "environment", 60),
    _check("B", "kernels of this package", "kernels", 600),
    _check("C", "engines of TensorRT: built and opened", "engines", 600),
    _check("D", "KVCacheUpdate alone", "cache_update", 120),
    _check("E", "IAttention alone", "attention_layer", 300),
    _check("F", "sessions against the NumPy engine", "sessions", 900),
    _check("G", "CUDA graphs", "graphs", 300),
    _check("H", "compilation at run time", "compilation", 1000),
    _check("I", "time", "timing", 600),
    _check("J", "memory", "memory", 300),
    _check("K", "greedy tokens of the shipped model", "greedy", 600),
)

BY_LETTER = {check.letter: check for check in CHECKS}
