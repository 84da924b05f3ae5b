"""Recurrent mixers: a state of fixed size instead of K and V of each token."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from trt_kvcache._util.checks import int_in_range, positive_number
from trt_kvcache.dtypes import numpy_dtype
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
        True if the projections and the convolution have biases.

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

    @property
    def state_shape(self) -> None:
        """None: it has no state besides the convolution's."""
        return None


@dataclass(frozen=True, kw_only=True)
class Mamba2Config:
    """Mamba-2: ``out(norm(scan(x, b, c, dt) * silu(z)))`` with ``z, (x, b, c), dt = in(hidden)``.

    Before the scan, ``x``, ``b`` and ``c`` go through a convolution with SiLU. The norm may come before the gate, or be absent.

    It keeps the last ``kernel`` inputs of the convolution, and a state ``[num_heads, head_dim, state_size]``.

    Parameters
    ----------
    num_heads, head_dim : int
        Heads of ``x`` and ``z``, and elements of each.
    state_size : int
        Elements of a vector ``b`` or ``c``.
    num_groups : int
        Number of vectors ``b``, and of vectors ``c``, per token: a divisor of ``num_heads``. The norm has the same number of groups.
    kernel : int
        Inputs that an output of the convolution depends on.
    norm : NormConfig or None
        Norm of the scan's output.
    gate_first : bool
        True if the gate multiplies the input of the norm, False if it multiplies its output.
    conv_bias, bias : bool
        True if the convolution, or the projections, have biases.
    out_bias : bool or None
        True if the output projection has a bias, where that differs from ``bias``.
    input_multiplier : float
        Factor of the hidden state before the input projection.
    projection_multipliers : tuple of float
        Factors of ``z``, ``x``, ``b``, ``c`` and ``dt`` after that projection, rounded to the compute dtype; none at all for factors of 1.
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
    norm: NormConfig | None
    gate_first: bool = True
    conv_bias: bool = True
    bias: bool = False
    out_bias: bool | None = None
    input_multiplier: float = 1.0
    projection_multipliers: tuple[float, ...] = ()
    dt_min: float = 0.0
    dt_max: float | None = None

    def __post_init__(self) -> None:
        if self.norm is not None:
            _rms_norm("Mamba2Config.norm", self.norm)
        elif not self.gate_first:
            raise ConfigError("Mamba2Config.gate_first: expected True without a norm, got False.")
        positive_number("Mamba2Config.input_multiplier", self.input_multiplier)
        if len(self.projection_multipliers) not in (0, 5):
            raise ConfigError(f"Mamba2Config.projection_multipliers: expected 5 numbers or none, got {len(self.projection_multipliers)}.")
        for index, factor in enumerate(self.projection_multipliers):
            positive_number(f"Mamba2Config.projection_multipliers[{index}]", factor)
        for name in ("num_heads", "head_dim", "state_size", "num_groups", "kernel"):
            int_in_range(f"Mamba2Config.{name}", getattr(self, name), 1, MAX_DIMENSION, error=ConfigError)
        if self.num_heads % self.num_groups:
            raise ConfigError(f"Mamba2Config.num_groups: expected a divisor of num_heads={self.num_heads}, got {self.num_groups}.")
        if not 0 <= self.dt_min <= (sys.float_info.max if self.dt_max is None else self.dt_max) <= sys.float_info.max:
            raise ConfigError(f"Mamba2Config.dt_min: expected finite numbers, 0 <= dt_min <= dt_max, got {self.dt_min} and {self.dt_max}.")

    @property
    def inner(self) -> int:
        """Elements of ``x`` and of ``z``."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: ``x``, ``b`` and ``c``."""
        return self.inner + 2 * self.num_groups * self.state_size

    @property
    def has_out_bias(self) -> bool:
        """True if the output projection has a bias."""
        return self.bias if self.out_bias is None else self.out_bias

    def projection_factors(self, dtype: str) -> npt.NDArray[Any] | None:
        """Return the factor of each output of the input projection, in a dtype; None for factors of 1.

        Parameters
        ----------
        dtype : str
            The compute dtype.

        Returns
        -------
        numpy.ndarray ``[inner + channels + num_heads]`` or None
            In ``dtype``.
        """
        if not self.projection_multipliers:
            return None
        shared = self.num_groups * self.state_size
        widths = (self.inner, self.inner, shared, shared, self.num_heads)
        return np.repeat(np.asarray(self.projection_multipliers), widths).astype(numpy_dtype(dtype))

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of the recurrent state, next to the convolution's."""
        return self.num_heads, self.head_dim, self.state_size


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetConfig:
    """The gated delta net of Qwen3-Next and Qwen3.5: ``out(norm(rule(q, k, v, a, b)) * silu(z))``.

    ``(q, k, v), z, b, a`` are projections of the hidden state. ``q``, ``k`` and ``v`` go through a convolution with SiLU; ``q`` and ``k``
    are divided by their L2 norms. The rule, for each head of ``v`` and token by token::

        state = exp(-exp(a_log) * softplus(a + dt_bias)) * state
        state = state + outer(k, sigmoid(b) * (v - k @ state))
        out = q @ state / sqrt(key_head_dim)

    It keeps the last ``kernel`` inputs of the convolution, and a state ``[num_value_heads, key_head_dim, value_head_dim]``.

    Parameters
    ----------
    num_key_heads, key_head_dim : int
        Heads of ``q`` and of ``k``, and elements of each.
    num_value_heads, value_head_dim : int
        Heads of ``v`` and of ``z``, and elements of each. A multiple of ``num_key_heads``: adjacent value heads share a head of ``q`` and
        ``k``.
    kernel : int
        Inputs that an output of the convolution depends on.
    norm : NormConfig
        Norm of each head of the rule's output. All heads share a weight.

    Raises
    ------
    ConfigError
        A number is out of range, or numbers contradict each other.
    """

    kind: ClassVar[str] = "gated_delta_net"

    num_key_heads: int
    key_head_dim: int
    num_value_heads: int
    value_head_dim: int
    kernel: int
    norm: NormConfig

    def __post_init__(self) -> None:
        _rms_norm("GatedDeltaNetConfig.norm", self.norm)
        for name in ("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim", "kernel"):
            int_in_range(f"GatedDeltaNetConfig.{name}", getattr(self, name), 1, MAX_DIMENSION, error=ConfigError)
        if self.num_value_heads % self.num_key_heads:
            raise ConfigError(
                f"GatedDeltaNetConfig.num_value_heads: expected a multiple of num_key_heads={self.num_key_heads}, "
                f"got {self.num_value_heads}."
            )

    @property
    def key_width(self) -> int:
        """Elements of ``q`` and of ``k``."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """Elements of ``v`` and of ``z``."""
        return self.num_value_heads * self.value_head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: ``q``, ``k`` and ``v``."""
        return 2 * self.key_width + self.value_width

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of the recurrent state, next to the convolution's."""
        return self.num_value_heads, self.key_head_dim, self.value_head_dim


#: Recurrent mixers.
RecurrentConfig = ShortConvConfig | Mamba2Config | GatedDeltaNetConfig


def _rms_norm(name: str, norm: NormConfig) -> None:
    """Refuse LayerNorm, which no engine computes in these mixers."""
    if norm.centered:
        raise ConfigError(f"{name}.centered: expected False, got True.")
