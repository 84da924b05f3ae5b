"""``ModelIdentity``: the model that computed the K, V and states of a snapshot."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trt_kvcache.errors import ConfigError


def check_type(name: str, value: object, expected: type) -> None:
    """Raise :class:`ConfigError` unless ``value`` is an ``expected``; the message calls it ``name``."""
    if not isinstance(value, expected):
        raise ConfigError(f"{name}: expected a {expected.__name__}, got {value!r}.")


@dataclass(frozen=True, kw_only=True)
class ModelIdentity:
    """The model that computed the K, V and states of a snapshot.

    A snapshot is restored only for a model of equal identity.

    Parameters
    ----------
    fingerprint : str
        :meth:`trt_kvcache.checkpoint.Checkpoint.fingerprint`, or any other text that differs between different models.
    rope : mapping of str to JSON values, optional
        :meth:`trt_kvcache.model.RopeConfig.to_dict`: the RoPE that was applied to the cached keys.
    adapter : str, optional
        A hash of the adapter that ran next to the weights; None for the model alone. ``fingerprint`` covers an adapter that is merged.

    Raises
    ------
    ConfigError
        ``fingerprint`` or ``adapter`` is not a text or empty, or ``rope`` is not a mapping of JSON values.

    Examples
    --------
    >>> from trt_kvcache import ModelIdentity
    >>> saved_with = ModelIdentity(fingerprint="5f3a", rope={"rope_type": "default", "rope_theta": 10000.0})
    >>> saved_with == ModelIdentity(fingerprint="5f3a", rope={"rope_type": "default", "rope_theta": 500000.0})
    False
    """

    fingerprint: str
    rope: Mapping[str, Any] | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.fingerprint, str) or not self.fingerprint:
            raise ConfigError(f"ModelIdentity.fingerprint: expected a text, got {self.fingerprint!r}.")
        if self.adapter is not None and (not isinstance(self.adapter, str) or not self.adapter):
            raise ConfigError(f"ModelIdentity.adapter: expected a text or None, got {self.adapter!r}.")
        if self.rope is not None:
            check_type("ModelIdentity.rope", self.rope, Mapping)
            try:
                rope = json.loads(json.dumps(dict(self.rope), allow_nan=False))
            except (TypeError, ValueError, RecursionError) as error:
                raise ConfigError(f"ModelIdentity.rope: expected JSON values, got {self.rope!r} ({error}).") from None
            object.__setattr__(self, "rope", rope)
