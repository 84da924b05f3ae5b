"""What a snapshot says beside its tensors: which model, and how the next token is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trt_kvcache.checks import int_in_range
from trt_kvcache.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ModelIdentity:
    """Which model the K, V and states are of.

    Parameters
    ----------
    fingerprint : str
        :meth:`trt_kvcache.checkpoint.Checkpoint.fingerprint`, or anything else that differs where models differ.
    rope : mapping of str to JSON values, optional
        :meth:`trt_kvcache.checkpoint.RopeConfig.to_dict`. Keys are stored rotated by it.

    Raises
    ------
    ConfigError
        No fingerprint, or a ``rope`` that is no mapping.
    """

    fingerprint: str
    rope: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.fingerprint, str) or not self.fingerprint:
            raise ConfigError(f"ModelIdentity.fingerprint: expected a text, got {self.fingerprint!r}.")
        if not isinstance(self.rope, Mapping | None):
            raise ConfigError(f"ModelIdentity.rope: expected a mapping or None, got {self.rope!r}.")
        object.__setattr__(self, "rope", None if self.rope is None else dict(self.rope))


@dataclass(frozen=True, kw_only=True)
class SamplerState:
    """The whole state of a :class:`~trt_kvcache.sampling.Sampler`.

    Parameters
    ----------
    seed : int
    counter : int
        Tokens chosen so far.

    Raises
    ------
    RangeError
    """

    seed: int
    counter: int

    def __post_init__(self) -> None:
        for name in ("seed", "counter"):
            object.__setattr__(self, name, int_in_range(f"SamplerState.{name}", getattr(self, name), 0))
