"""Rotary position embedding (RoPE): the supported scalings, and tables of cosine and sine."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache._util.checks import one_of
from trt_kvcache._util.shown import shown
from trt_kvcache.checkpoint.config_fields import ConfigFields
from trt_kvcache.errors import ConfigError

ROPE_KINDS = ("default", "linear", "llama3")

DEFAULT_THETA = 10000.0

_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
# A larger int has no float.
_LARGEST = sys.float_info.max

_KNOWN_FIELDS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor", *_NUMBERS})


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """How RoPE computes an angle from a position.

    Parameters
    ----------
    kind : {"default", "linear", "llama3"}
        ``"linear"`` divides all positions by ``factor``. ``"llama3"`` divides the frequencies of long wavelengths by ``factor``, keeps
        those of short wavelengths, and interpolates in between.
    theta : float
        Base of the geometric series of wavelengths.
    factor : float
        Scaling factor of ``"linear"`` and ``"llama3"``.
    low_freq_factor, high_freq_factor : float
        For ``"llama3"``: it interpolates over the wavelengths from ``original_max_position_embeddings / high_freq_factor`` to
        ``original_max_position_embeddings / low_freq_factor``, in tokens.
    original_max_position_embeddings : int
        For ``"llama3"``: context length during pretraining, in tokens.

    Raises
    ------
    ConfigError
        The kind is unknown, or a number is out of range.

    Examples
    --------
    >>> from trt_kvcache.checkpoint import RopeConfig
    >>> config = {"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    >>> rope = RopeConfig.from_dict(config, max_position_embeddings=2048)
    >>> rope.kind, rope.theta, rope.factor
    ('linear', 500000.0, 4.0)
    """

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        one_of("RopeConfig.kind", self.kind, ROPE_KINDS)
        for name in ("theta", *_NUMBERS):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LARGEST:
                raise ConfigError(f"RopeConfig.{name}: expected a finite number > 0, got {shown(value)}.")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"RopeConfig.high_freq_factor: expected more than low_freq_factor={self.low_freq_factor}, got {self.high_freq_factor}."
            )

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], *, max_position_embeddings: int) -> RopeConfig:
        """Read the RoPE fields of a ``config.json`` as transformers 5 or an earlier version writes it.

        Parameters
        ----------
        config : mapping of str to object
            The whole ``config.json``, with ``rope_parameters``, or with ``rope_theta`` and ``rope_scaling``.
        max_position_embeddings : int
            Used if a ``llama3`` scaling has no ``original_max_position_embeddings``, as in transformers, which does not look for it
            beside the scaling either.

        Returns
        -------
        RopeConfig
            The scaling; without any such field, ``"default"`` with a theta of 10000.

        Raises
        ------
        ConfigError
            The scaling is not supported, or the same value is given twice and differs.
        """
        top = ConfigFields(config)
        spelling, rope = _rope_object(config)
        kind = _kind(rope, spelling)
        unknown = sorted(name for name in rope if name not in _KNOWN_FIELDS and rope[name] is not None)
        if unknown:
            raise ConfigError(f"{spelling}: expected only {', '.join(sorted(_KNOWN_FIELDS))}, got {', '.join(unknown):.200} as well.")
        fields = ConfigFields(rope, f"{spelling}.")
        for place in (fields, top):
            if "partial_rotary_factor" in place and place.get("partial_rotary_factor") != 1:
                raise place.refusal("partial_rotary_factor", "1 (RoPE over the whole head; partial RoPE is not supported)")
        theta = fields.number("rope_theta", top.number("rope_theta", DEFAULT_THETA))
        if kind == "default":
            return cls(kind=kind, theta=theta)
        if kind == "linear":
            return cls(kind=kind, theta=theta, factor=fields.number("factor"))
        name = "original_max_position_embeddings"
        if name in fields and name in top and fields.get(name) != top.get(name):
            raise ConfigError(f"{name}: expected one value, got {shown(top.get(name))} and, in {spelling}, {shown(fields.get(name))}.")
        return cls(
            kind=kind,
            theta=theta,
            factor=fields.number("factor"),
            low_freq_factor=fields.number("low_freq_factor"),
            high_freq_factor=fields.number("high_freq_factor"),
            original_max_position_embeddings=fields.integer(name, max_position_embeddings),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the object that transformers 5 writes as ``rope_parameters``.

        Returns
        -------
        dict
            Values that JSON can hold.
        """
        result: dict[str, Any] = {"rope_type": self.kind, "rope_theta": self.theta}
        if self.kind != "default":
            result["factor"] = self.factor
        if self.kind == "llama3":
            result["low_freq_factor"] = self.low_freq_factor
            result["high_freq_factor"] = self.high_freq_factor
            result["original_max_position_embeddings"] = self.original_max_position_embeddings
        return result


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
    cos, sin : ndarray float32 ``[length, head_dim // 2]``
        In host memory. They are computed in float64 and rounded once.

    Raises
    ------
    ConfigError
        ``head_dim`` is odd or not positive, or ``length`` is negative.

    Notes
    -----
    Element ``d`` of a head is rotated together with element ``d + head_dim // 2``: the pairing of GPT-NeoX and Hugging Face
    transformers, not that of GPT-J.

    Examples
    --------
    >>> from trt_kvcache.checkpoint import RopeConfig, rope_table
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
    angles = np.arange(length, dtype=np.float64)[:, None] * _frequencies(rope, head_dim)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _frequencies(rope: RopeConfig, head_dim: int) -> npt.NDArray[np.float64]:
    """Return radians per position, ``[head_dim // 2]``, fastest first."""
    frequencies = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "default":
        return frequencies
    scaled = frequencies / rope.factor
    if rope.kind == "linear":
        return scaled
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
    mixed: npt.NDArray[np.float64] = kept * frequencies + (1.0 - kept) * scaled
    return mixed


def _rope_object(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the value of the object that describes the scaling; the object is empty if there is none."""
    given = [(name, config[name]) for name in ("rope_parameters", "rope_scaling") if config.get(name)]
    if not given:
        return "rope_parameters", {}
    if len(given) == 2 and given[0][1] != given[1][1]:
        raise ConfigError(
            f"rope_parameters and rope_scaling: expected one of them, got both: {shown(given[0][1])} and {shown(given[1][1])}."
        )
    name, value = given[0]
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}: expected an object, got {shown(value)}.")
    if any(isinstance(item, Mapping) for item in value.values()):
        raise ConfigError(f"{name}: expected one RoPE for all layers, got one per layer type: {', '.join(value):.200}.")
    return name, value


def _kind(rope: Mapping[str, Any], spelling: str) -> str:
    kinds = [rope[name] for name in ("rope_type", "type") if rope.get(name) is not None]
    if len(kinds) > 1 and kinds[0] != kinds[1]:
        raise ConfigError(f"{spelling}: expected `rope_type` and `type` to agree, got {shown(kinds[0])} and {shown(kinds[1])}.")
    kind = kinds[0] if kinds else "default"
    if kind not in ROPE_KINDS:
        raise ConfigError(f"{spelling}: RoPE scaling {shown(kind)} is not supported. Supported: {', '.join(ROPE_KINDS)}.")
    return str(kind)
