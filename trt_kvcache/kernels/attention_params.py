"""``AttentionParams``: a checked attention call, as the backends take it."""

import math
from dataclasses import dataclass

from trt_kvcache.memory.tensor import DeviceTensor

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
        The cache of the layer, of either layout. New K and V are written into it in place, rounded to its dtype.
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
