"""``AttentionParams``: a checked attention call, as the backends take it."""

import math
from dataclasses import dataclass

from trt_kvcache.memory.tensor import DeviceTensor

#: Dimensions of the scales of a layer: one for each head ``[2, H]``, or for each token and head ``[B, 2, H, S or more]``.
HEAD_SCALES_NDIM, TOKEN_SCALES_NDIM = 2, 4

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, kw_only=True)
class AttentionParams:
    """The arguments of :func:`~trt_kvcache.kernels.attend`, checked.

    Parameters
    ----------
    q, out : DeviceTensor ``[B, s, num_heads, D]``
        Queries of the new tokens, before RoPE; and what attention gives for them. ``out`` is contiguous and may be ``q``.
    k, v : DeviceTensor ``[B, s, num_kv_heads, D]``
        K and V of the new tokens, before RoPE, to be appended to the cache. Like ``q`` they may be strided by slot and token.
    cache : DeviceTensor ``[B, 2, num_kv_heads, S, D]``
        The cache of the layer, of either layout. New K and V are written into it in place, rounded to its dtype: that of ``q``, or
        ``"float8_e4m3fn"`` or ``"int8"``.
    kv_scales : DeviceTensor ``[2, num_kv_heads]`` or ``[B, 2, num_kv_heads, S or more]`` float32, or None
        None unless the cache is quantized. Real value = stored value * scale. With four dimensions each token has its own scale, heads are
        dense with a multiple of 4 tokens, slots and K and V may be strided, and everything starts at multiples of 16 bytes; the call
        writes the scales of the new tokens. With two the scales are read only, and the tensor is dense.
    lengths : DeviceTensor (B,) int32
        Live rows of each slot before the call, and so the position of its first new token.
    new_lengths : DeviceTensor (B,) int32, or None
        None: all s tokens of each slot are new.
    cos_sin : DeviceTensor ``[S or more, 2, rotary_dim / 2]`` float32, or None
        None: RoPE is not applied.
    scale : float
        What products of q and k are multiplied with.
    window : int
        Tokens that a token attends to, with itself; 0 for all.
    softcap : float
        0 for none.
    """

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
    """Return the two factors of ``ScoreTransform`` in ``plugins/attention/softmax_state.cuh``.

    Parameters
    ----------
    scale : float
        What products of q and k are multiplied with.
    softcap : float
        0 for none.

    Returns
    -------
    factor, inverse_softcap : float
        What makes a score an exponent of 2; and what a product is multiplied with before tanh, 0 without a softcap.
    """
    return _LOG2_E * (softcap or scale), scale / softcap if softcap else 0.0
