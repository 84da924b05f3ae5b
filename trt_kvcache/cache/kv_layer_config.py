"""``KVLayerConfig``: the K/V heads of one attention layer, with their static scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trt_kvcache._util.checks import int_in_range, one_of
from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.dtypes import KV_SCALES, SCALED_KV_DTYPES, itemsize
from trt_kvcache.errors import ConfigError
from trt_kvcache.memory.shapes import MAX_DIMENSION, row_nbytes

# Scales are stored as float32: below the smallest normal one or above the largest they would become 0 or infinite.
_SCALE_MIN, _SCALE_MAX = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True)
class KVLayerConfig:
    """K/V heads of one attention layer.

    Parameters
    ----------
    num_kv_heads : int
        Key-value heads, H.
    head_dim : int
        Elements of one K or V row, D. ``D * itemsize`` must be a multiple of 16 bytes.
    k_scale, v_scale : float, or sequence of float (H,)
        For ``float8_e4m3fn`` and ``int8`` with static scales: real value = stored value * scale, one scale for all heads or one for each.
        Finite and above 0, as float32. Other dtypes do not use it, nor do scales by token.

    Raises
    ------
    ConfigError
        A field is out of range.

    Notes
    -----
    ``KVLayerConfig`` of TensorRT Edge-LLM.

    Examples
    --------
    >>> from trt_kvcache import KVLayerConfig
    >>> KVLayerConfig(num_kv_heads=8, head_dim=128)
    KVLayerConfig(num_kv_heads=8, head_dim=128, k_scale=1.0, v_scale=1.0)
    """

    num_kv_heads: int
    head_dim: int
    k_scale: float | Sequence[float] = 1.0
    v_scale: float | Sequence[float] = 1.0

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "head_dim"):
            object.__setattr__(self, name, int_in_range(f"KVLayerConfig.{name}", getattr(self, name), 1, MAX_DIMENSION, error=ConfigError))
        for name in ("k_scale", "v_scale"):
            object.__setattr__(self, name, _static_scale(f"KVLayerConfig.{name}", getattr(self, name), self.num_kv_heads))

    @property
    def scales_by_head(self) -> bool:
        """True if each head has its own static scale."""
        return isinstance(self.k_scale, tuple) or isinstance(self.v_scale, tuple)

    @property
    def head_scales(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The static scale of each head: of K, then of V."""
        k, v = ((scale,) * self.num_kv_heads if isinstance(scale, int | float) else tuple(scale) for scale in (self.k_scale, self.v_scale))
        return k, v

    def token_nbytes(self, dtype: str, *, scaled: bool) -> int:
        """Return the bytes of K and V of one token in this layer.

        Parameters
        ----------
        dtype : str
            Of K and V.
        scaled : bool
            True if each head of a token has a scale for K and one for V.
        """
        return 2 * self.num_kv_heads * (row_nbytes(self.head_dim, dtype) + (itemsize("float32") if scaled else 0))


def _static_scale(name: str, value: Any, heads: int) -> float | tuple[float, ...]:
    """Return a scale, or one for each head, as plain numbers."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return _scale(name, value)
    if len(value) != heads:
        raise ConfigError(f"{name}: expected a number, or one for each of {heads} heads, got {len(value)}.")
    return tuple(_scale(f"{name}[{head}]", number) for head, number in enumerate(value))


def _scale(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating) or not _SCALE_MIN <= value <= _SCALE_MAX:
        raise ConfigError(f"{name}: expected a finite float32 above 0, got {short_repr(value)}.")
    return float(value)


def check_scales(owner: str, scales: Any, dtype: str, layers: Sequence[KVLayerConfig]) -> str | None:
    """Return the kind of scales of a cache, one of ``KV_SCALES``; None for a dtype without. ``owner`` is the configuration, for errors."""
    if dtype not in SCALED_KV_DTYPES:
        if scales is not None:
            raise ConfigError(f"{owner}.scales: expected None for K and V in {dtype}, got {short_repr(scales)}.")
        return None
    by_head = any(layer.scales_by_head for layer in layers)
    if scales is None:
        return "head" if by_head else "tensor"
    one_of(f"{owner}.scales", scales, KV_SCALES)
    kind = str(scales)
    if by_head and kind != "head":
        raise ConfigError(f"{owner}.scales: expected 'head' for layers with a scale for each head, got {kind!r}.")
    if kind == "token" and any(scale != 1 for layer in layers for scale in (layer.k_scale, layer.v_scale)):
        raise ConfigError(f"{owner}.scales: expected 'tensor' or 'head' for layers with scales, got 'token', which are computed.")
    return kind
