"""``GuidanceOptions``: limits of guided decoding."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trt_kvcache._util.checks import int_in_range
from trt_kvcache.errors import RangeError


@dataclass(frozen=True, kw_only=True)
class GuidanceOptions:
    """Limits of a grammar in its worker process. A grammar above a limit ends its own request only.

    Parameters
    ----------
    compile_seconds : float
        Time to compile it.
    mask_seconds : float
        Time to compute one token mask.
    memory_mib : int
        Memory in MiB.
    max_compiles : int
        Grammars that are compiled at the same time; further ones wait.

    Raises
    ------
    RangeError
        A limit is not above 0.

    Notes
    -----
    Seconds are CPU time. The limit of wall-clock time is ten times as long, for busy machines.

    Examples
    --------
    >>> GuidanceOptions(compile_seconds=0.5).mask_seconds
    1.0
    """

    compile_seconds: float = 2.0
    mask_seconds: float = 1.0
    memory_mib: int = 512
    max_compiles: int = 2

    def __post_init__(self) -> None:
        for name in ("compile_seconds", "mask_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise RangeError(f"GuidanceOptions.{name}: expected a number above 0, got {getattr(self, name)!r}.")
        int_in_range("GuidanceOptions.memory_mib", self.memory_mib, 1)
        int_in_range("GuidanceOptions.max_compiles", self.max_compiles, 1)
