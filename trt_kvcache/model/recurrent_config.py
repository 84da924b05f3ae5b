"""Mixers that keep a state of fixed size instead of K and V of each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trt_kvcache._util.checks import int_in_range
from trt_kvcache.errors import ConfigError
from trt_kvcache.memory.shapes import MAX_DIMENSION
from trt_kvcache.model.norm_config import NormConfig


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


@dataclass(frozen=True, kw_only=True)
class Mamba2Config:
    """Mamba-2: ``out(norm(scan(x, b, c, dt) * silu(z)))`` with ``z, (x, b, c), dt = in(hidden)``.

    Before the scan, ``x``, ``b`` and ``c`` go through a convolution with SiLU.

    It keeps the last ``kernel`` inputs of the convolution, and a state ``[num_heads, head_dim, state_size]``.

    Parameters
    ----------
    num_heads, head_dim : int
        ``x`` and ``z`` are so many heads of so many elements.
    state_size : int
        Elements of ``b`` and ``c``.
    num_groups : int
        How many ``b`` and ``c`` there are: a divisor of ``num_heads``. The norm runs over as many groups of elements.
    kernel : int
        Inputs that an output of the convolution depends on.
    norm : NormConfig
        Of what comes out of the scan.
    conv_bias, bias : bool
        Whether the convolution, and the projections, have biases.
    dt_min : float
        The smallest time step.
    dt_max : float or None
        The largest one.

    Raises
    ------
    ConfigError
        A number is out of range, or numbers contradict each other.
    """

    kind: ClassVar[str] = "mamba2"

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    kernel: int
    norm: NormConfig
    conv_bias: bool = True
    bias: bool = False
    dt_min: float = 0.0
    dt_max: float | None = None

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_dim", "state_size", "num_groups", "kernel"):
            int_in_range(f"Mamba2Config.{name}", getattr(self, name), 1, MAX_DIMENSION, error=ConfigError)
        if self.num_heads % self.num_groups:
            raise ConfigError(f"Mamba2Config.num_groups: expected a divisor of num_heads={self.num_heads}, got {self.num_groups}.")

    @property
    def inner(self) -> int:
        """Elements of ``x`` and of ``z``."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: ``x``, ``b`` and ``c``."""
        return self.inner + 2 * self.num_groups * self.state_size


#: Mixers with states.
RecurrentConfig = ShortConvConfig | Mamba2Config
