"""``AttentionParams``: the arguments of an attention kernel. Not checked."""

import math
from dataclasses import dataclass
from typing import Any

from trt_kvcache.memory.tensor import DeviceTensor

#: Dimensions of the scales of a layer: one for each head ``[2, H]``, or for each token and head ``[B, 2, H, S or more]``.
HEAD_SCALES_NDIM, TOKEN_SCALES_NDIM = 2, 4

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, kw_only=True)
class AttentionParams:
    """The arguments of :func:`~trt_kvcache.kernels.attend`, which describes shapes, dtypes and strides."""

    q: DeviceTensor  # [B, s, num_heads, D], before RoPE; slots and tokens may be strided
    k: DeviceTensor | None  # [B, s, num_kv_heads, D], before RoPE, strided as q may be; None: the new rows are in the cache already
    v: DeviceTensor | None  # as k
    cache: DeviceTensor  # [B, 2, num_kv_heads, S, D], of the dtype of q or quantized; k and v, if given, are appended in place
    kv_scales: DeviceTensor | None = None  # float32, with a quantized cache: [2, num_kv_heads], read; or one a token, written with it
    lengths: DeviceTensor  # (B,) int32, live rows before the call: the position of the first new token
    new_lengths: DeviceTensor | None  # (B,) int32; None: all s tokens of each slot are new
    cos_sin: DeviceTensor | None  # [S or more, 2, rotary_dim / 2] float32; None: no RoPE
    out: DeviceTensor  # [B, s, num_heads, D], contiguous; may be q
    scale: float  # factor of q @ k
    window: int  # tokens that a token attends to, itself included; 0 for all
    softcap: float  # 0 for none
    sinks: DeviceTensor | None = None  # (num_heads,) float32: another logit of each query head in the softmax, without a value
    ancestors: DeviceTensor | None = None  # [B, s] int64, contiguous: trees of new tokens; None: each attends to all before it

    @property
    def memory(self) -> Any:
        """Memory of all tensors: for the CUDA half a CudaMemory."""
        return self.cache.memory

    @property
    def group(self) -> int:
        """Query heads for each K/V head."""
        return self.q.shape[2] // self.cache.shape[2]

    @property
    def scales_per_token(self) -> bool:
        """True if each token and head has a scale, which is written with its row."""
        return self.kv_scales is not None and self.kv_scales.ndim == TOKEN_SCALES_NDIM

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that RoPE rotates."""
        return 0 if self.cos_sin is None else 2 * self.cos_sin.shape[2]


def score_factors(scale: float, softcap: float) -> tuple[float, float]:
    """Return the two factors of ``ScoreTransform`` in ``plugins/attention/softmax_state.cuh``.

    The first turns a score into an exponent of 2; the second multiplies q @ k before tanh, and is 0 without a softcap.
    """
    return _LOG2_E * (softcap or scale), scale / softcap if softcap else 0.0
