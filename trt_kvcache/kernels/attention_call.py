"""``AttentionCall``: what a backend is asked to do."""

import math
from dataclasses import dataclass

from trt_kvcache.memory.tensor import DeviceTensor

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """What :func:`~trt_kvcache.kernels.attend` was called with, checked."""

    q: DeviceTensor
    k: DeviceTensor
    v: DeviceTensor
    cache: DeviceTensor
    lengths: DeviceTensor
    new_lengths: DeviceTensor | None
    cos_sin: DeviceTensor | None
    out: DeviceTensor
    scale: float
    window: int
    softcap: float

    @property
    def group(self) -> int:
        """Query heads for each K/V head."""
        return self.q.shape[2] // self.k.shape[2]

    @property
    def rotary_dim(self) -> int:
        """Elements of a row that are turned."""
        return 0 if self.cos_sin is None else 2 * self.cos_sin.shape[2]


def score_factors(scale: float, softcap: float) -> tuple[float, float]:
    """Return what turns a product of q and k into an exponent of 2, and what it is multiplied with before tanh: 0 without a softcap."""
    return _LOG2_E * (softcap or scale), scale / softcap if softcap else 0.0
