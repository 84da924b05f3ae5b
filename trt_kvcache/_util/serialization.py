"""Reading configurations back from the plain values (numbers, texts, lists) that their ``to_dict`` returned."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from trt_kvcache.errors import ConfigError

T = TypeVar("T")


def config_from_dict(kind: type[T], data: Mapping[str, Any], **readers: Callable[[Any], Any]) -> T:
    """Return a configuration from its stored form. ``readers`` convert the stored values of fields that are no plain values."""
    name = kind.__name__
    try:
        values = dict(data)
        for field, reader in readers.items():
            values[field] = reader(values[field])
        return kind(**values)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{name}: the stored form has a missing or unknown field ({error}).") from None
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{name}: {error}.") from None
