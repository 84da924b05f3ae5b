"""Checks of the arguments of public functions. Messages follow :mod:`trt_kvcache.errors`; ``what`` names the argument in them."""

import operator
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np

from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.errors import ConfigError, KVCacheError, LayerIndexError, RangeError, ShapeError, SlotError


def as_int(what: str, value: Any, *, error: type[KVCacheError] = RangeError) -> int:
    """Return an integer as an int; a bool or a float is an error."""
    if isinstance(value, bool):
        raise error(f"{what}: expected an integer, got {short_repr(value)}.")
    try:
        return operator.index(value)
    except TypeError:
        raise error(f"{what}: expected an integer, got {short_repr(value)}.") from None


def as_sequence(what: str, value: Any) -> Sequence[Any]:
    """Return a sequence or an array of one or more dimensions as it is; a text is neither."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence | np.ndarray) or getattr(value, "ndim", 1) == 0:
        raise ShapeError(f"{what}: expected a sequence, got {type(value).__name__}.")
    return value  # type: ignore[return-value]  # NumPy arrays index as sequences do


def int_in_range(what: str, value: Any, low: int, high: int | None = None, *, error: type[KVCacheError] = RangeError) -> int:
    """Return an integer from ``low`` to ``high``, both included, as an int."""
    number = value if type(value) is int else as_int(what, value, error=error)
    if number < low or (high is not None and number > high):
        expected = f"at least {low}" if high is None else f"an integer from {low} to {high}"
        raise error(f"{what}: expected {expected}, got {short_repr(number)}.")
    return number


def one_of(what: str, value: Any, known: Collection[str], *, error: type[KVCacheError] = ConfigError) -> None:
    """Check that a value is one of the known names."""
    if not isinstance(value, str) or value not in known:
        raise error(f"{what}: expected one of {', '.join(known)}, got {short_repr(value)}.")


def slot_index(slot: Any, count: int, *, of: str = "batch slots") -> int:
    """Return a slot index from 0 to ``count - 1`` as an int."""
    number = as_int("slot", slot, error=SlotError)
    if not 0 <= number < count:
        raise SlotError(f"slot {short_repr(number)}: expected 0 <= slot < {count} ({of}). Slots never wrap.")
    return number


def layer_index(index: Any, count: int, *, name: str = "attn_layer_idx") -> int:
    """Return a layer index from 0 to ``count - 1`` as an int."""
    number = as_int(name, index, error=LayerIndexError)
    if not 0 <= number < count:
        raise LayerIndexError(f"{name} {short_repr(number)}: expected 0 <= {name} < {count}. Indices never wrap.")
    return number


def positive_number(what: str, value: Any, *, error: type[KVCacheError] = ConfigError) -> None:
    """Check that a value is a finite number greater than 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise error(f"{what}: expected a finite number > 0, got {short_repr(value)}.")


def similar_option(name: str, known: Collection[str], other_names: Mapping[str, str], *, cutoff: float = 0.7) -> str | None:
    """Return the option that an unknown name probably stands for, or None. ``other_names``: names in other projects."""
    return other_names.get(name) or next(iter(get_close_matches(name, known, n=1, cutoff=cutoff)), None)


def option_names(
    what: str,
    given: Iterable[str],
    known: Collection[str],
    other_names: Mapping[str, str],
    *,
    error: type[KVCacheError] = ConfigError,
) -> None:
    """Check that options exist; the error suggests similar ones."""
    unknown = sorted(set(given) - set(known))
    if unknown:
        meant = [similar_option(name, known, other_names) for name in unknown]
        hints = "".join(f" Did you mean {one} instead of {name}?" for name, one in zip(unknown, meant, strict=True) if one is not None)
        raise error(f"{what}: unknown option {', '.join(unknown)}.{hints} Expected {', '.join(known)}.")
