"""Checks of plain arguments, with the message form of :mod:`trt_kvcache.errors`."""

import operator
from collections.abc import Collection
from typing import Any

from trt_kvcache.errors import ConfigError, KVCacheError, LayerIndexError, RangeError, SlotError


def as_int(what: str, value: Any, *, error: type[KVCacheError] = RangeError) -> int:
    """Return ``value`` as an int; a bool, float or anything that is not an integer raises ``error``."""
    if isinstance(value, bool):
        raise error(f"{what}: expected an integer, got {value!r}.")
    try:
        return operator.index(value)
    except TypeError:
        raise error(f"{what}: expected an integer, got {value!r}.") from None


def int_in_range(what: str, value: Any, low: int, high: int | None = None, *, error: type[KVCacheError] = RangeError) -> int:
    """Return ``value`` as an int with ``low <= value <= high`` (no upper bound if ``high`` is None), else raise ``error``."""
    number = value if type(value) is int else as_int(what, value, error=error)
    if number < low or (high is not None and number > high):
        expected = f"at least {low}" if high is None else f"an integer from {low} to {high}"
        raise error(f"{what}: expected {expected}, got {number}.")
    return number


def one_of(what: str, value: Any, known: Collection[str], *, error: type[KVCacheError] = ConfigError) -> None:
    """Raise ``error`` unless ``value`` is one of ``known``."""
    if value not in known:
        raise error(f"{what}: expected one of {', '.join(known)}, got {value!r}.")


def slot_index(slot: Any, count: int, *, of: str = "batch slots") -> int:
    """Return ``slot`` if ``0 <= slot < count``, else raise :class:`SlotError`."""
    number = as_int("slot", slot, error=SlotError)
    if not 0 <= number < count:
        raise SlotError(f"slot {number}: expected 0 <= slot < {count} ({of}). Slots never wrap.")
    return number


def layer_index(index: Any, count: int, *, name: str = "attn_layer_idx") -> int:
    """Return ``index`` if ``0 <= index < count``, else raise :class:`LayerIndexError`."""
    number = as_int(name, index, error=LayerIndexError)
    if not 0 <= number < count:
        raise LayerIndexError(f"{name} {number}: expected 0 <= {name} < {count}. Indices never wrap.")
    return number
