"""What a snapshot says beside its tensors: which model, and how the next token is chosen."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trt_kvcache._util.checks import as_int
from trt_kvcache.errors import ConfigError
from trt_kvcache.generation.sampling import SamplingParams


def check_record(what: str, record: Any, kind: type) -> None:
    """Raise :class:`ConfigError` unless ``record`` is a ``kind``."""
    if not isinstance(record, kind):
        raise ConfigError(f"{what}: expected a {kind.__name__}, got {record!r}.")


@dataclass(frozen=True, kw_only=True)
class ModelIdentity:
    """Which model the K, V and states are of.

    Raises ConfigError: no fingerprint, or a ``rope`` that is no mapping of JSON values.

    Parameters
    ----------
    fingerprint
        :meth:`trt_kvcache.checkpoint.Checkpoint.fingerprint`, or anything else that differs where models differ.
    rope : mapping of str to JSON values, optional
        :meth:`trt_kvcache.checkpoint.RopeConfig.to_dict`. Keys are stored rotated by it.
    """

    fingerprint: str
    rope: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.fingerprint, str) or not self.fingerprint:
            raise ConfigError(f"ModelIdentity.fingerprint: expected a text, got {self.fingerprint!r}.")
        if self.rope is not None:
            check_record("ModelIdentity.rope", self.rope, Mapping)
            try:
                rope = json.loads(json.dumps(dict(self.rope), allow_nan=False))
            except (TypeError, ValueError, RecursionError) as error:
                raise ConfigError(f"ModelIdentity.rope: expected JSON values, got {self.rope!r} ({error}).") from None
            object.__setattr__(self, "rope", rope)


@dataclass(frozen=True, kw_only=True)
class SamplerState:
    """The whole state of a :class:`~trt_kvcache.generation.sampling.Sampler`.

    Raises RangeError: out of the range that :class:`~trt_kvcache.generation.sampling.SamplingParams` takes.

    Parameters
    ----------
    counter
        Tokens chosen so far.
    """

    seed: int
    counter: int

    def __post_init__(self) -> None:
        for name in ("seed", "counter"):
            object.__setattr__(self, name, as_int(f"SamplerState.{name}", getattr(self, name)))
        SamplingParams(seed=self.seed, counter=self.counter)
