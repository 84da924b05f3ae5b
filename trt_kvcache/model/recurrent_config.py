"""Mixers that keep a state of fixed size instead of K and V of each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trt_kvcache._util.checks import int_in_range
from trt_kvcache.errors import ConfigError
from trt_kvcache.memory.shapes import MAX_DIMENSION


@dataclass(frozen=True, kw_only=True)
class ShortConvConfig:
    """The gated short convolution of LFM2: ``out(c * conv(b * x))`` with ``b, c, x = in(hidden)``, a kernel for each channel.

    It keeps the last ``kernel`` inputs of the convolution.

    Parameters
    ----------
    channels : int
        Channels of the convolution: the width of ``b``, ``c`` and ``x``.
    kernel : int
        Inputs that an output depends on, its own included.
    bias : bool
        Whether the projections and the convolution have biases.

    Raises
    ------
    ConfigError
        A number is out of range.
    """

    kind: ClassVar[str] = "short_conv"

    channels: int
    kernel: int
    bias: bool = False

    def __post_init__(self) -> None:
        for name in ("channels", "kernel"):
            int_in_range(f"ShortConvConfig.{name}", getattr(self, name), 1, MAX_DIMENSION, error=ConfigError)


#: Mixers with states.
RecurrentConfig = ShortConvConfig
