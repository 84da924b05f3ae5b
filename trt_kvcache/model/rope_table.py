"""Tables of the cosine and sine of RoPE's angles."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from trt_kvcache.errors import ConfigError
from trt_kvcache.model.rope import RopeConfig

#: Limit, above the size of any head.
_FAR = 1e9


def rope_table(rope: RopeConfig, head_dim: int, length: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Compute the cosine and sine of the RoPE angle for every position and frequency.

    Parameters
    ----------
    rope : RopeConfig
        The scaling.
    head_dim : int
        Elements of a head; even.
    length : int
        Number of positions; they begin at 0.

    Returns
    -------
    cos, sin : ndarray float32 ``[length, rotary_dim // 2]``
        In host memory, for the part of a head that is rotated, times the factor that ``"yarn"`` and ``"longrope"`` have. They are computed
        in float64 and rounded once.

    Raises
    ------
    ConfigError
        ``head_dim`` is odd or not positive, or does not fit the scaling, or ``length`` is negative.

    Notes
    -----
    Element ``d`` of a head is rotated together with element ``d + rotary_dim // 2``: the pairing of GPT-NeoX and Hugging Face
    transformers, not of GPT-J.

    With ``"dynamic"`` and ``"longrope"`` the angles depend on the length of the sequence. Keys are rotated once, when they are cached, so
    the length of the table decides: as for a sequence that fills the cache.

    Examples
    --------
    >>> from trt_kvcache.model import RopeConfig, rope_table
    >>> cos, sin = rope_table(RopeConfig(kind="default", theta=10000.0), head_dim=4, length=3)
    >>> cos.shape
    (3, 2)
    >>> print(sin[1])
    [0.84147096 0.00999983]
    """
    if head_dim <= 0 or head_dim % 2:
        raise ConfigError(f"rope_table: expected an even head_dim > 0, got {head_dim}.")
    if length < 0:
        raise ConfigError(f"rope_table: expected length >= 0, got {length}.")
    rope.check_head_dim(head_dim)
    angles = np.arange(length, dtype=np.float64)[:, None] * _frequencies(rope, rope.rotary_dim(head_dim), length)
    cos, sin = (rope.attention_factor * function(angles) for function in (np.cos, np.sin))
    return cos.astype(np.float32), sin.astype(np.float32)


def _frequencies(rope: RopeConfig, dim: int, length: int) -> npt.NDArray[np.float64]:
    """Return radians per position, ``[dim // 2]``, fastest first, for sequences of up to ``length`` tokens."""
    exponents = -np.arange(0, dim, 2, dtype=np.float64) / dim
    frequencies: npt.NDArray[np.float64] = rope.theta**exponents
    if rope.kind == "default":
        return frequencies
    original = rope.original_max_position_embeddings
    if rope.kind == "dynamic":
        stretched = rope.factor * max(length, original) / original - (rope.factor - 1)
        raised: npt.NDArray[np.float64] = (rope.theta * stretched ** (dim / (dim - 2))) ** exponents
        return raised
    if rope.kind == "longrope":
        divided: npt.NDArray[np.float64] = frequencies / np.array(rope.long_factor if length > original else rope.short_factor)
        return divided
    scaled = frequencies / rope.factor
    if rope.kind == "proportional":
        scaled[int(rope.partial_rotary_factor * dim // 2) :] = 0
    if rope.kind in ("linear", "proportional"):
        return scaled
    kept = _kept_by_yarn(rope, dim) if rope.kind == "yarn" else _kept_by_llama3(rope, frequencies)
    mixed: npt.NDArray[np.float64] = kept * frequencies + (1.0 - kept) * scaled
    return mixed


def _kept_by_llama3(rope: RopeConfig, frequencies: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the unscaled share of each frequency, by its turns over the original context."""
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    return np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)


def _kept_by_yarn(rope: RopeConfig, dim: int) -> npt.NDArray[np.float64]:
    """Return the unscaled share of each frequency, by its index."""

    def index(turns: float) -> float:
        found = dim * math.log(rope.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        return min(max(found, -_FAR), _FAR)  # a theta near 1 gives no finite index

    low, high = index(rope.beta_fast), index(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0
    kept: npt.NDArray[np.float64] = 1.0 - np.clip((np.arange(dim // 2) - low) / (high - low), 0.0, 1.0)
    return kept
