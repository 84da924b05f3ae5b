"""``AttentionParams``: a checked attention call, as the backends take it."""

import math
from dataclasses import dataclass
from typing import Any

from trt_kvcache.memory.tensor import DeviceTensor

#: Dimensions of the scales of a layer: one for each head ``[2, H]``, or for each token and head ``[B, 2, H, S or more]``.
HEAD_SCALES_NDIM, TOKEN_SCALES_NDIM = 2, 4

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, kw_only=True)
class AttentionParams:
    """The arguments of :func:`~trt_kvcache.kernels.attend`, checked."""

    q: DeviceTensor
    k: DeviceTensor
    v: DeviceTensor
    cache: DeviceTensor
    kv_scales: DeviceTensor | None = None
    lengths: DeviceTensor
    new_lengths: DeviceTensor | None
    cos_sin: DeviceTensor | None
    out: DeviceTensor
    scale: float
    window: int
    softcap: float

    @property
    def memory(self) -> Any:
        """Memory of all tensors: for the CUDA half a CudaMemory."""
        return self.cache.memory

    @property
    def group(self) -> int:
        """Query heads for each K/V head."""
        return self.q.shape[2] // self.k.shape[2]

    @property
    def scales_per_token(self) -> bool:
        """Whether each row of the cache has a scale of its own, which is written with it."""
        return self.kv_scales is not None and self.kv_scales.ndim == TOKEN_SCALES_NDIM

    @property
    def rotary_dim(self) -> int:
        """Elements of a row that RoPE is applied to."""
        return 0 if self.cos_sin is None else 2 * self.cos_sin.shape[2]


def score_factors(scale: float, softcap: float) -> tuple[float, float]:
    """Return the two factors of ``ScoreTransform`` in ``plugins/attention/softmax_state.cuh``."""
    return _LOG2_E * (softcap or scale), scale / softcap if softcap else 0.0
