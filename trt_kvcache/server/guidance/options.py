"""``GuidanceOptions``: what guided decoding may cost."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trt_kvcache._util.checks import int_in_range
from trt_kvcache.errors import RangeError


@dataclass(frozen=True, kw_only=True)
class GuidanceOptions:
    """What a grammar may cost in its worker process. One that costs more ends its own request.

    Parameters
    ----------
    compile_seconds : float
        To compile it.
    mask_seconds : float
        To compute which tokens may come next, once.
    memory_mib : int
        Memory that it takes, in MiB.
    max_compiles : int
        Grammars that are compiled at a time; further ones wait.

    Raises
    ------
    RangeError
        A number is not above 0.

    Notes
    -----
    Seconds are those of a processor. Where workers get too little of one, they may last ten times as long by the clock.

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
